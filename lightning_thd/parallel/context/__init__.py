"""Which context-parallel rank holds which slots of a pack, what it needs of others, and what that costs."""
