"""What a graph cannot hold, found before or while it is captured."""
