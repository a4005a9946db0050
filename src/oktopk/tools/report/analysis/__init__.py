"""Read the files of a run and compute its report."""
