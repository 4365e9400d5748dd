"""What the double's frameworks share: recipes."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
