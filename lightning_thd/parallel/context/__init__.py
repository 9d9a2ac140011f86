"""Padded lengths and context-parallel ranks -> the slots each rank holds and the keys it needs of others."""
