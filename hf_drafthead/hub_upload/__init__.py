"""What leaves for the Hub, in one commit that others can use."""

from hf_drafthead.hub_upload.destination import Target
from hf_drafthead.hub_upload.push import Push, push_folder, push_model
from hf_drafthead.hub_upload.uploads import check_saved, check_training

__all__ = ["Push", "Target", "check_saved", "check_training", "push_folder", "push_model"]
