"""The arithmetic of a loss, a tile of rows of the logits at a time."""
