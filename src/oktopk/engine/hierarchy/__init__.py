"""Hierarchical all-reduce: the ranks of a host average among themselves, and one of them speaks for all."""
