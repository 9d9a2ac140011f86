"""What a CUDA graph cannot hold, found before or while a step is captured."""
