"""Recurrent layers on parts of sequences: states go from rank to rank, or from a prefix to its branches."""
