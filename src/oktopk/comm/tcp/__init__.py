"""Dedicated TCP connections between ranks."""
