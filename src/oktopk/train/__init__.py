"""The trainer: workloads, their data, and the loop."""
