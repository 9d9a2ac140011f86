"""A transformers config -> the layers of its model: sizes, the parts of a layer, and a table of families."""
