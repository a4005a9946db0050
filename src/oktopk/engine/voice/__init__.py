"""What the library tells people: a plan, decisions, an ending, a summary; each once, on rank 0."""
