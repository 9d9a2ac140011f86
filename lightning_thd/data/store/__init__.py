"""Token ids, labels and lengths as memory-mapped arrays, and the index of a dataset."""
