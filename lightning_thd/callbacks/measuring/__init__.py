"""Batches of a run -> rates and MFU: what the callbacks and the loops of other hosts measure with."""
