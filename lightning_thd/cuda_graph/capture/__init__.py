"""A step or a layer -> a CUDA graph of its forward and one of its backward."""
