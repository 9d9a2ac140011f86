"""What a family of models does to a row -> the same for each sequence of a pack; one file for each quirk."""

from lightning_thd.models.families.registry import register_family

__all__ = ["register_family"]
