"""What leaves for the Hub: nothing goes out unchecked."""

from hf_drafthead.hub_upload.push import Push, Target, push_folder, push_model

__all__ = ["Push", "Target", "push_folder", "push_model"]
