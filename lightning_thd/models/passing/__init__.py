"""Recurrent layers on context-parallel shards: ranks send states to each other instead of gathering packs."""
