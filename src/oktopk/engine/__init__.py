"""One step of training: buckets in, means out, in the background; what all front ends hold."""
