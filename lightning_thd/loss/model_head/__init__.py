"""A model called without its head: its hidden states and the head's weight, for losses without logits."""
