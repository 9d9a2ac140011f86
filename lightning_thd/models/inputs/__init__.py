"""What a model makes of a pack's ids, positions, masks and labels -> the same for each of its sequences."""
