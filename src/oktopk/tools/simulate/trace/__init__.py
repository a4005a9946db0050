"""Communication recorded from a real run, and replayed at another scale."""
