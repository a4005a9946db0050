"""The networks that can be trained, a file for each kind of data."""
