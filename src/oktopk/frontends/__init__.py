"""What users call: the DDP hook, the wrapped optimizer, and the all-reducer of a hand-written loop."""
