"""A transformers config -> the layers of its model: sizes, the parts of a layer, and one line a family."""
