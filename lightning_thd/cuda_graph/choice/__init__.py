"""Which shapes to capture, and what that is worth."""
