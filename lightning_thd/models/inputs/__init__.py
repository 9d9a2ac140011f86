"""A pack's ids, positions, masks and labels -> what a model computes of them, for each sequence by itself."""
