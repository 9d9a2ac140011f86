"""Recurrent layers on shards of packs: states are passed from rank to rank in place of gathering packs."""
