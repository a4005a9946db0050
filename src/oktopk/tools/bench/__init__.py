"""All ways to reduce gradients, side by side: how long a step takes, what it costs, and what it sends."""
