"""What the workloads learn from: files read with checks, embedded data, and how ranks share them."""
