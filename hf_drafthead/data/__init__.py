"""Where training, distillation and measurements get their rows from: chats, texts, prompts, questions in one form."""

from hf_drafthead.data.sources import read_records, read_rows

__all__ = ["read_records", "read_rows"]
