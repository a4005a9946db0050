"""Checkpoints of a run: what is saved, how it is committed, and how it is loaded."""
