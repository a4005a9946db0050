"""Record the messages of real steps, and replay them at another scale."""
