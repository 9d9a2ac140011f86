"""The shapes that are captured, and batches padded to them."""
