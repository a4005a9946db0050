"""Error feedback: residuals, momentum, and the accumulator that adds them to the gradient."""
