"""Text for language models: words, sentence pairs, and the embedded prose."""
