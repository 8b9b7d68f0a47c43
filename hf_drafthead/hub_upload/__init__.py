"""What leaves for the Hub, and what is served: nothing goes out unchecked."""

from hf_drafthead.hub_upload.bundle import add_bundle, refresh_bundle
from hf_drafthead.hub_upload.push import Push, Target, push_folder, push_model

__all__ = ["Push", "Target", "add_bundle", "push_folder", "push_model", "refresh_bundle"]
