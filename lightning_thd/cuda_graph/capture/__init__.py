"""A step or a layer -> a graph of its forward and one of its backward."""
