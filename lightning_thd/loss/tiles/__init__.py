"""The arithmetic of fused losses, one tile of logits at a time."""
