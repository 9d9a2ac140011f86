"""What ranks of a stream tell each other: lengths, what moves, and steps for those that read nothing."""
