"""A model called without its head: what the head would have received, and its weight."""
