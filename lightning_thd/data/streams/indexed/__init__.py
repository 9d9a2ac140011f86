"""Lengths that a pass over the shards found -> epochs that are planned exactly and read at random."""
