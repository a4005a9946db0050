"""The trainer: workloads, their data, and the training loop."""
