"""Records too long to hold -> their values, a piece at a time."""
