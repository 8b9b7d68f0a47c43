"""Model cards: what a checkpoint's own files say about it, and nothing else."""

from hf_drafthead.cards.card import missing, write_card

__all__ = ["missing", "write_card"]
