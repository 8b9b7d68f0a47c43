"""The rows of training, distillation and measurements: chats, texts, prompts and questions in one form."""

from hf_drafthead.data.sources import read_records, read_rows

__all__ = ["read_records", "read_rows"]
