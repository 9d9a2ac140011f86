"""Recurrent layers on context-parallel shards: ranks pass states on instead of gathering packs."""
