"""Checkpoints of a run: what they hold, how they are committed, how they are loaded."""
