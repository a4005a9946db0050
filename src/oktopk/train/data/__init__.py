"""Training data: readers that check their input, generated data, and sharding over ranks."""
