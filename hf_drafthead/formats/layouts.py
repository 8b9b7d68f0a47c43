"""The layouts that are known, and which of them a checkpoint is in."""

from collections.abc import Iterable, Mapping
from typing import Any

from hf_drafthead.formats.eagle import Eagle
from hf_drafthead.formats.eagle3 import Eagle3
from hf_drafthead.formats.hydra import Hydra
from hf_drafthead.formats.layout import Layout
from hf_drafthead.formats.medusa import Medusa
from hf_drafthead.formats.medusa_full import MedusaFull
from hf_drafthead.formats.medusa_vllm import MedusaVllm
from hf_drafthead.formats.source import Source, find_sources
from hf_drafthead.formats.speculators import Speculators
from hf_drafthead.modeling.config import MODEL_TYPE_PREFIX

LAYOUTS: tuple[Layout, ...] = (Medusa(), MedusaFull(), MedusaVllm(), Hydra(), Eagle(), Eagle3(), Speculators())
OWN_PREFIXES = ("drafter.", "base.")  # names of this library


def targets() -> list[str]:
    """What `export --to` takes."""
    return sorted({target for layout in LAYOUTS for target in layout.targets})


def find(name: str, hub: Mapping[str, Any]) -> tuple[Source, Layout]:
    """The weights at a place, and their layout.

    Args:
        name: folder, file or Hub id.
        hub: keyword arguments of `transformers.utils.cached_file`.

    Raises:
        OSError: they cannot be read.
        ValueError: they are of no known layout, of this library's own, or of two layouts.
    """
    sources = find_sources(name, hub)
    found = [(source, layout) for source in sources if (layout := detect(source.tensors, source.config)) is not None]
    if len(found) > 1:
        names = " and ".join(f"{source.files[0]!r} ({layout.name})" for source, layout in found)
        raise ValueError(f"{name!r} holds heads twice: {names}; give the file of one of them.")
    if found:
        return found[0]
    keys = [key for source in sources for key in source.tensors]
    if str(sources[0].config.get("model_type", "")).startswith(MODEL_TYPE_PREFIX) or all(
        key.startswith(OWN_PREFIXES) for key in keys
    ):
        raise ValueError(f"{name!r} is a checkpoint of this library already: load it with AutoModel.from_pretrained.")
    known = ", ".join(layout.name for layout in LAYOUTS)
    shown = ", ".join(repr(key) for key in sorted(keys)[:3])
    raise ValueError(
        f"{name!r} is of no known layout: it has {len(keys)} tensors such as {shown}; known are {known}: give one of "
        "these; a base without heads needs no conversion, put new heads on it with from_base."
    )


def detect(keys: Iterable[str], config: Mapping[str, Any]) -> Layout | None:
    """The layout that tensors of these names are of; None if it is not known."""
    names = list(keys)
    return next((layout for layout in LAYOUTS if layout.detect(names, config)), None)
