"""The networks, one file per kind of data."""
