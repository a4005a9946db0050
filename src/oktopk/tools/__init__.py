"""Programs around the library."""
