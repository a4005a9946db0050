"""From the files of a run to the figures of its report."""
