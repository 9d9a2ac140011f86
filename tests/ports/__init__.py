"""Training scripts of nine kinds, written anew in the structure of the originals and ported to packs."""
