"""Training draft heads: data, objectives, the Trainer, self-distillation."""

from hf_drafthead.training.arguments import DraftHeadTrainingArguments
from hf_drafthead.training.run import Trained, train_heads
from hf_drafthead.training.trainer import DraftHeadTrainer

__all__ = ["DraftHeadTrainer", "DraftHeadTrainingArguments", "Trained", "train_heads"]
