"""Measure the costs of this machine: kernels, coding, links."""
