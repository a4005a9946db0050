"""Runs and checks the code blocks of the documents; `python -m tests.support.docs` lists those that do not run."""
