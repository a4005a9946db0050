"""What this machine and this network cost: kernels, coding, links."""
