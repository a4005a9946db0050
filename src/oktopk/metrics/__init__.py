"""What a step did: events, traffic, timing, and the sinks that record them."""
