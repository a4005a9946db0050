"""Files, signals, child processes and optional dependencies."""
