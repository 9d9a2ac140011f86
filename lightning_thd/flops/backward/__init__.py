"""A module -> which of its weights are trained, and the backward pass that this asks of every layer."""
