"""Checkpoints of other projects on disk.

They are read as tensors, mapped from disk and never run as code; and written all or nothing.
"""

import os
import pickle
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import extract_commit_hash

from hf_drafthead.modeling.files import fetch_file, is_missing_folder, map_tensors, read_json, weights_in, why_missing

CONFIG = "config.json"
# Files of heads alone, and files of a whole model; in each group safetensors come before pickles.
GROUPS = (
    ("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    ("hydra_lm_head.safetensors", "hydra_lm_head.pt"),
    ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
)
ENDINGS = (".safetensors", ".pt", ".bin", ".pth")
COMPILED = re.compile(r"(?<![^.])_orig_mod\.")
ENVELOPES = ("state_dict", "model", "module", "model_state_dict")  # under which trainers put the tensors


@dataclass(frozen=True)
class Joined:
    """A tensor that consists of other tensors, one behind the other in memory, and what their file calls them.

    Joining along the first dimension, and stacking, are both just that. Nothing is copied before it is used.
    """

    parts: tuple[Tensor, ...]
    shape: tuple[int, ...]
    sources: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Of every part."""
        return self.parts[0].dtype

    def tensor(self) -> Tensor:
        """The whole; a single part of the right shape is returned as it is."""
        if len(self.parts) == 1:
            return self.parts[0].view(self.shape)
        return torch.cat([part.reshape(-1) for part in self.parts]).view(self.shape)

    def not_finite(self) -> list[str]:
        """The parts that hold NaN or infinity, by their names in the file."""
        names = self.sources if len(self.sources) == len(self.parts) else self.sources[:1] * len(self.parts)
        # a sum is finite if all its numbers are, but for one that overflows
        return [name for name, part in zip(names, self.parts) if not (part.sum().isfinite() or part.isfinite().all())]


@dataclass(frozen=True)
class Source:
    """One file of weights, or the shards of one, mapped from disk where these allow it, and the config beside it.

    name is what the user called it, config is empty without a file, commit is the Hub's if it came from there.
    """

    name: str
    files: tuple[str, ...]
    config: dict[str, Any]
    tensors: Mapping[str, Tensor] = field(repr=False)
    commit: str | None = None


def find_sources(name: str, hub: Mapping[str, Any]) -> list[Source]:
    """The weights at a folder, file or Hub id: usually one file; several where heads and a model lie side by side."""
    if os.path.isfile(name):
        beside = os.path.join(os.path.dirname(name), CONFIG)
        return [_source(name, [name], beside if os.path.isfile(beside) else None)]
    if is_missing_folder(name):
        raise OSError(f"there is no file or folder {name!r}: give one, or the id of a repository on the Hub.")
    candidates = (((weights_in(name, file, hub), file) for file in group) for group in GROUPS)
    groups = [found for group in candidates if (found := next((pair for pair in group if pair[0]), None)) is not None]
    if not groups and os.path.isdir(name):
        alone = sorted(str(path) for path in Path(name).iterdir() if path.name.endswith(ENDINGS))
        groups = [([file], file) for file in alone]
        if len(groups) > 1:
            raise OSError(f"{name!r} holds {len(groups)} files of weights, such as {alone[0]!r}: give one of them.")
    if not groups:
        why = "it has none" if os.path.isdir(name) else why_missing(name, GROUPS[0][0], hub)
        what = "holds no weights" if why == "it has none" else f"cannot be read ({why})"
        expected = ", ".join(file for group in GROUPS for file in group[:2])
        raise OSError(f"{name!r} {what}: expected one of {expected}, ... or give the file itself.")
    config = fetch_file(name, CONFIG, hub)
    sources = []
    for files, file in groups:
        index = fetch_file(name, file, hub) if file.endswith(".index.json") else None
        sources.append(_source(name, files or [], config, index))
    return sources


def _source(name: str, files: list[str], config: str | None, index: str | None = None) -> Source:
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= map_tensors([file]) if file.endswith(".safetensors") else read_pickle(file)
    if lost := sorted(set(read_json(index)["weight_map"]) - set(tensors) if index else ()):
        raise OSError(f"{name!r} lacks {lost[0]!r}, which {os.path.basename(index or '')} names: get the files again.")
    fields = read_json(config) if config else {}
    return Source(name, tuple(files), fields, plain_names(tensors), extract_commit_hash(files[0], None))


def plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without what DistributedDataParallel, torch.compile and NeMo AutoModel put before their names.

    >>> list(plain_names({"module._orig_mod.model.fc.weight": torch.zeros(1), "module.lm_head.weight": torch.zeros(1)}))
    ['fc.weight', 'lm_head.weight']
    """
    named = {COMPILED.sub("", name): tensor for name, tensor in tensors.items()}
    while named and all(name.startswith("module.") for name in named):
        named = {name.removeprefix("module."): tensor for name, tensor in named.items()}
    if "model.fc.weight" in named:  # an EAGLE head as the inner model of a causal language model
        named = {name.removeprefix("model."): tensor for name, tensor in named.items()}
    return named if len(named) == len(tensors) else dict(tensors)


def read_pickle(file: str) -> dict[str, Tensor]:
    """The tensors of a file that `torch.save` wrote; nothing but tensors is ever built from it."""
    with open(file, "rb") as opened:
        start = opened.read(16)
    if start.startswith(b"version https://"):
        raise OSError(f"{file!r} is a Git LFS pointer and not the file itself: fetch it with `git lfs pull`.")
    zipped = zipfile.is_zipfile(file)
    if start.startswith(b"PK") and not zipped:
        raise OSError(f"{file!r} is cut off: copy or download it again.")
    try:
        # Only the newer, zipped form can be mapped.
        contents = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        if "Unsupported" in str(error):
            what = f"is a pickle that holds more than tensors ({_reason(error)})"
            advice = "it could run code, so it is not opened; ask its author for safetensors"
            raise OSError(f"{file!r} {what}: {advice}.") from None
        raise OSError(f"{file!r} is no file that torch.save wrote ({_reason(error)}): get it again.") from None
    except (EOFError, RuntimeError, KeyError, ValueError) as error:
        raise OSError(f"{file!r} is cut off or damaged ({_reason(error)}): copy or download it again.") from None
    for envelope in ENVELOPES:
        if isinstance(contents, Mapping) and isinstance(contents.get(envelope), Mapping):
            contents = contents[envelope]
    tensors = dict(contents) if isinstance(contents, Mapping) else {}
    if not tensors or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise OSError(f"{file!r} holds a {type(contents).__name__} and not a state dict: save the heads' state_dict().")
    return {str(name): tensor.detach() for name, tensor in tensors.items()}


def _reason(error: BaseException) -> str:
    """What torch found: the line that says it, without the advice around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    sentence = next((line for line in lines if "Unsupported" in line), lines[0] if lines else type(error).__name__)
    return sentence.split(". ")[0].rstrip(".")


def write_safetensors(path: Path, tensors: Mapping[str, Tensor | Joined]) -> None:
    """Write tensors, which may be mapped from other files, and share memory: those are written once each."""
    written: dict[str, Tensor] = {}
    places = set[int]()
    for name, tensor in tensors.items():
        whole = (tensor.tensor() if isinstance(tensor, Joined) else tensor).detach().cpu().contiguous()
        place = whole.untyped_storage().data_ptr()
        written[name] = whole.clone() if place in places else whole
        places.add(place)
    save_file(written, path, metadata={"format": "pt"})


def refuse_existing(folder: str | os.PathLike) -> None:
    """Refuse a folder to write to that holds something, or that lies in a folder which does not exist."""
    path = Path(folder)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise OSError(f"{str(folder)!r} exists: give a folder that does not, or that is empty.")
    if not path.absolute().parent.is_dir():
        raise OSError(f"{str(folder)!r} lies in {str(path.parent)!r}, which does not exist: make that folder first.")


@contextmanager
def new_folder(folder: str | os.PathLike) -> Iterator[Path]:
    """A folder to fill, which gets its name only when everything is in it."""
    refuse_existing(folder)
    path = Path(folder).absolute()
    # Beside the final place: paths relative to the one hold for the other, and a rename moves no data.
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent, ignore_cleanup_errors=True) as name:
        staged = Path(name)
        yield staged
        staged.chmod(0o755)
        if path.is_dir():
            path.rmdir()
        staged.rename(path)
