"""Parts of a communicator over torch's process groups: dense sums, messages by gloo, and how to wake gloo."""
