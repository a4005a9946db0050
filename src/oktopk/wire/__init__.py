"""Sparse vectors, and how they travel between ranks."""
