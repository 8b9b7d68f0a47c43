"""Draft heads of other projects, in and out: one file per layout, and never silent damage."""

from hf_drafthead.formats.convert import Conversion, convert_checkpoint, converted
from hf_drafthead.formats.export import Export, export_checkpoint
from hf_drafthead.formats.mtp import own_modules

__all__ = ["Conversion", "Export", "convert_checkpoint", "converted", "export_checkpoint", "own_modules"]
