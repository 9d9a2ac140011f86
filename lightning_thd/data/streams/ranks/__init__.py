"""Messages between the ranks of a stream: lengths, moved samples, and steps for ranks that read nothing."""
