"""Draft heads as ordinary Hugging Face models: the base model's own text, in a fraction of its forward passes.

Importing this package registers its model families with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`.
"""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_drafthead.version import __version__ as __version__

if TYPE_CHECKING:  # at run time `load_families` brings these, of which those in the last line are the table's
    from hf_drafthead.door import from_pretrained
    from hf_drafthead.exactness import exact
    from hf_drafthead.formats import convert_checkpoint, export_checkpoint
    from hf_drafthead.generation import DraftHeadGenerateOutput, DraftTree, TextIndex
    from hf_drafthead.modeling import DraftHeadConfig, DraftHeadPreTrainedModel, from_base
    from hf_drafthead.modeling.families import *  # noqa: F403

__all__ = [
    "DraftHeadConfig",
    "DraftHeadGenerateOutput",
    "DraftHeadPreTrainedModel",
    "DraftTree",
    "TextIndex",
    "convert_checkpoint",
    "exact",
    "export_checkpoint",
    "from_base",
    "from_pretrained",
]


def load_families() -> None:
    """Register the families and make the names of this package available; imports torch and transformers."""
    from hf_drafthead import bases

    bases.releases.check_installed()  # before anything is imported that another transformers may lack

    from hf_drafthead import door, exactness, formats, generation, modeling
    from hf_drafthead.modeling.families import CLASSES

    rooms = (door, exactness, formats, generation, modeling)
    for name in [name for name in __all__ if name not in CLASSES]:
        globals()[name] = next(getattr(room, name) for room in rooms if hasattr(room, name))
    modeling.DraftHeadPreTrainedModel.heads_output = _heads_output
    globals().update(CLASSES)
    __all__.extend(name for name in CLASSES if name not in __all__)


def _heads_output(model: Any, *args: Any, **inputs: Any) -> Any:
    """What a model with labels returns in training mode; `modeling` itself knows nothing of training."""
    from hf_drafthead.training.trainer import heads_output

    return heads_output(model, *args, **inputs)


def _started_as_command() -> bool:
    """Whether this process is the command line, which imports torch only where a command needs it.

    A script of the user's own may have the command's name: what pip has installed imports `hf_drafthead.cli`.
    """
    program = Path(sys.argv[0] if getattr(sys, "argv", None) else "")
    if program.name == "-m":
        options = zip(sys.orig_argv, sys.orig_argv[1:])
        return any(re.fullmatch("-[A-Za-z]*m", option) and name == "hf_drafthead" for option, name in options)
    if program.name == "hf-drafthead" and program.is_file():
        return "hf_drafthead.cli" in program.read_text(encoding="utf-8", errors="replace")
    return program.name in ("hf-drafthead", "hf-drafthead.exe")


if not _started_as_command():
    load_families()
