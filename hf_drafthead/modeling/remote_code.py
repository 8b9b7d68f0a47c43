"""The code of a checkpoint: a file that imports this package, for `trust_remote_code=True` where nobody else does."""

from typing import Any

CODE_FILE = "modeling_drafthead.py"  # in a checkpoint's folder
# It outlives this version of the package, of which it asks for public names alone.
CODE = '''\
"""The classes of these draft heads are in the package hf_drafthead (pip install hf-drafthead), which this file imports.

It lets `from_pretrained(..., trust_remote_code=True)` load them where the package is installed but was not imported.
"""

from hf_drafthead import {0}Config, {0}ForCausalLM

__all__ = ["{0}Config", "{0}ForCausalLM"]
'''


def code_of(config_class: type) -> str:
    """The text of the file, for heads with such a config."""
    return CODE.format(config_class.__name__.removesuffix("Config"))


def code_references(config_class: type) -> dict[str, str]:
    """The `auto_map` of a checkpoint: which names of that file transformers' Auto classes take."""
    place, name = CODE_FILE.removesuffix(".py"), config_class.__name__
    model = f"{place}.{name.removesuffix('Config')}ForCausalLM"
    return {"AutoConfig": f"{place}.{name}", "AutoModel": model, "AutoModelForCausalLM": model}


def is_of_the_package(kind: type) -> bool:
    """Whether a class is one of this package, and not one that a user has derived from it."""
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


class NotCopied:
    """A class whose code transformers does not copy into checkpoints, as it does with what came as remote code."""

    @classmethod
    def register_for_auto_class(cls, *args: Any) -> None:
        """As in transformers, for classes that users derive; those of this package are imported, wherever they go."""
        if not is_of_the_package(cls):
            super().register_for_auto_class(*args)  # type: ignore[misc]
