"""A module -> which of its weights are trained, and the backward pass that every layer then needs."""
