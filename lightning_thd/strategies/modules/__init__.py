"""What a user's module brings along -> the same on many ranks: its metrics, weights frozen for a time."""
