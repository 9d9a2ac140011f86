"""Token ids, labels and lengths as memory-mapped arrays, and the index of a dataset."""

from lightning_thd.data.store.tokens import Rows, TokenStore, cached_store, count_targets

__all__ = ["Rows", "TokenStore", "cached_store", "count_targets"]
