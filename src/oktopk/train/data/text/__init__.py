"""Text for language models: Penn Treebank, sentence pairs, and generated text."""
