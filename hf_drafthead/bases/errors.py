"""Why a tree cannot go: the base does not take it, or there is no memory for it."""

import torch

# of devices without an error class of their own
WORDS = ("out of memory", "can't allocate memory", "not enough memory")


class Unsupported(Exception):
    """The tree cannot go here; the text is the reason, fit for the end of a sentence.

    lasting: whether it holds for later calls too, until something about the base changes.
    """

    def __init__(self, reason: str, lasting: bool = True):
        super().__init__(reason)
        self.lasting = lasting


class DoesNotFit(Exception):
    """The nodes of a step do not fit into memory; its cause is the error of the device."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is short, and nothing else."""
    short = isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS)
    return short or isinstance(error, (torch.OutOfMemoryError, MemoryError))
