"""Writing a checkpoint: tensor by tensor, so that no second copy of it is ever in memory, and all of it or nothing."""

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_drafthead.formats.heads import Joined

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


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
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
