"""Checkpoints of other projects on disk.

They are read as tensors, mapped from disk and never run as code; and written tensor by tensor, so that no second copy
is ever in memory, and all of it or nothing.
"""

import json
import os
import pickle
import re
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_drafthead.formats.heads import Joined
from hf_drafthead.modeling.checkpoint import fetch_file, map_tensors

CONFIG = "config.json"
# Files of heads alone, and files of a whole model; in each group safetensors come before pickles.
GROUPS = (
    ("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    ("hydra_lm_head.safetensors", "hydra_lm_head.pt"),
    ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
)
ENDINGS = (".safetensors", ".pt", ".bin", ".pth")
INDEX = ".index.json"
COMPILED = re.compile(r"(?<![^.])_orig_mod\.")
ENVELOPES = ("state_dict", "model", "module", "model_state_dict")  # under which trainers put the tensors


@dataclass(frozen=True)
class Source:
    """One file of weights, or the shards of one, and the config beside it.

    Attributes:
        name: the checkpoint, as the user named it.
        files: of weights, with their paths here.
        config: what config.json says; empty without one.
        tensors: by their names in the files; mapped from disk where the file allows it.
        commit: of the Hub, if it came from there.
        folder: where the files lie here.
    """

    name: str
    files: tuple[str, ...]
    config: dict[str, Any]
    tensors: Mapping[str, Tensor] = field(repr=False)
    commit: str | None = None

    @property
    def folder(self) -> str:
        """Where the files lie on this machine."""
        return os.path.dirname(self.files[0])

    @property
    def nbytes(self) -> int:
        """Size of the files."""
        return sum(os.path.getsize(file) for file in self.files)


def find_sources(name: str, hub: Mapping[str, Any]) -> list[Source]:
    """The weights at a place: usually one file; several where heads and a model lie side by side.

    Args:
        name: folder, file or Hub id.
        hub: keyword arguments of `transformers.utils.cached_file` (`revision`, `token`, `subfolder`, ...).

    Raises:
        OSError: there is nothing to read, or what is there cannot be read.
    """
    if os.path.isfile(name):
        return [_source(name, [name], _read_config(_beside(name)), None)]
    if not os.path.isdir(name) and (os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1):
        raise OSError(f"there is no file or folder {name!r}: give one, or the id of a repository on the Hub.")
    groups = [found for group in GROUPS if (found := _first_of(name, group, hub)) is not None]
    if not groups and os.path.isdir(name):
        other = sorted(str(path) for path in Path(name).iterdir() if path.name.endswith(ENDINGS))
        if len(other) > 1:
            raise OSError(f"{name!r} holds {len(other)} files of weights, such as {other[0]!r}: give one of them.")
        groups = [[file] for file in other]
    if not groups:
        known = ", ".join(name for group in GROUPS for name in group[:2])
        raise OSError(f"{name!r} holds no weights: expected one of {known}, ... or give the file itself.")
    config = _read_config(fetch_file(name, CONFIG, hub))
    return [_source(name, files, config, _commit_of(files[0])) for files in groups]


def _source(name: str, files: list[str], config: dict[str, Any], commit: str | None) -> Source:
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= map_tensors([file]) if file.endswith(".safetensors") else read_pickle(file)
    return Source(name, tuple(files), config, plain_names(tensors), commit)


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


def _first_of(name: str, group: tuple[str, ...], hub: Mapping[str, Any]) -> list[str] | None:
    for candidate in group:
        found = fetch_file(name, candidate, hub)
        if found is None:
            continue
        if not candidate.endswith(INDEX):
            return [found]
        shards = sorted(set(_read_config(found).get("weight_map", {}).values()))
        files = [fetch_file(name, shard, hub) for shard in shards]
        missing = [shard for shard, file in zip(shards, files, strict=True) if file is None]
        if missing or not shards:
            raise OSError(
                f"{name!r} lacks {missing[0] if missing else 'the files'}, which its {candidate} names: copy or "
                "download the checkpoint again."
            )
        return [file for file in files if file is not None]
    return None


def _beside(file: str) -> str | None:
    config = os.path.join(os.path.dirname(file), CONFIG)
    return config if os.path.isfile(config) else None


def _read_config(file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        config = json.loads(Path(file).read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise OSError(f"{file!r} is not readable JSON ({error}): copy or download it again.") from None
    if not isinstance(config, dict):
        raise OSError(f"{file!r} is not a JSON object: copy or download it again.")
    return config


def _commit_of(file: str) -> str | None:
    """The commit in the path of a file of the Hub's cache."""
    found = re.search(r"/snapshots/([0-9a-f]{40})/", Path(file).as_posix())
    return found[1] if found else None


def read_pickle(file: str) -> dict[str, Tensor]:
    """The tensors of a file that `torch.save` wrote; nothing but tensors is ever built from it.

    Raises:
        OSError: it is cut off, is no such file, holds code, or holds something else than tensors.
    """
    with open(file, "rb") as opened:
        start = opened.read(16)
    if start.startswith(b"version https://"):
        raise OSError(f"{file!r} is a Git LFS pointer and not the file itself: fetch it with `git lfs pull`.")
    zipped = zipfile.is_zipfile(file)
    if start.startswith(b"PK") and not zipped:
        raise OSError(f"{file!r} is cut off: copy or download it again.")
    try:
        # Only the newer, zipped form can be mapped.
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        if "Unsupported" in str(error):
            raise OSError(
                f"{file!r} is a pickle that holds more than tensors ({_reason(error)}): it could run code, so it is "
                "not opened; ask its author for safetensors."
            ) from None
        raise OSError(f"{file!r} is no file that torch.save wrote ({_reason(error)}): get it again.") from None
    except (EOFError, RuntimeError, KeyError, ValueError) as error:
        raise OSError(f"{file!r} is cut off or damaged ({_reason(error)}): copy or download it again.") from None
    for envelope in ENVELOPES:
        if isinstance(found, Mapping) and isinstance(found.get(envelope), Mapping):
            found = found[envelope]
    if not isinstance(found, Mapping) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise OSError(f"{file!r} holds a {type(found).__name__} and not a state dict: save the heads' state_dict().")
    return {str(name): tensor.detach() for name, tensor in found.items()}


def _reason(error: BaseException) -> str:
    """What torch found: the line that says it, without the advice around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "Unsupported" in line), lines[0] if lines else type(error).__name__)
    return told.split(". ")[0].rstrip(".")


# The names of the types in the header of a safetensors file.
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}
ALIGNMENT = 8


def write_safetensors(path: Path, tensors: Mapping[str, Tensor | Joined]) -> None:
    """Write tensors one part after the other; they may be mapped from other files, and may share memory.

    The library's own writer wants every tensor whole and apart from all others, in memory at one time.

    Args:
        path: of the file.
        tensors: by name, of the types above.
    """
    joined = {
        name: one if isinstance(one, Joined) else Joined((one,), tuple(one.shape), (name,))
        for name, one in tensors.items()
    }
    # Wider types first, as the library orders them: then every tensor begins at a multiple of its type's size.
    order = sorted(joined, key=lambda name: (-joined[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        one = joined[name]
        end = at + one.nbytes
        header[name] = {"dtype": TYPES[one.dtype], "shape": list(one.shape), "data_offsets": [at, end]}
        at = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % ALIGNMENT)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for name in order:
            for part in joined[name].parts:
                file.write(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_pickle(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a state dict as `torch.save` does; a row of a larger tensor is copied, or all of it would be stored."""
    torch.save({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, path)


def write_config(path: Path, fields: Mapping[str, Any]) -> None:
    """Write one JSON object, as transformers lays it out."""
    path.write_text(json.dumps(fields, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")


def refuse_existing(folder: str | os.PathLike) -> None:
    """Refuse a folder to write to that is there already.

    Raises:
        OSError: it is, and holds something; or what should hold it does not exist.
    """
    path = Path(folder)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise OSError(f"{str(folder)!r} exists: give a folder that does not, or that is empty.")
    if not path.absolute().parent.is_dir():
        raise OSError(f"{str(folder)!r} lies in {str(path.parent)!r}, which does not exist: make that folder first.")


@contextmanager
def new_folder(folder: str | os.PathLike) -> Iterator[Path]:
    """A folder to fill, which gets its name only when everything is in it.

    Raises:
        OSError: as `refuse_existing`.
    """
    refuse_existing(folder)
    path = Path(folder).absolute()
    # Beside the final place: paths relative to the one hold for the other, and a rename moves no data.
    staged = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield staged
        staged.chmod(0o755)
        if path.is_dir():
            path.rmdir()
        staged.rename(path)
    finally:
        if staged.exists():
            shutil.rmtree(staged)
