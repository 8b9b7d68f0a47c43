"""What a push sends of a folder, and whether others could use it: looked at before anything is sent."""

import re
from fnmatch import fnmatch
from pathlib import Path

import torch
from huggingface_hub import HfApi, ModelInfo, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

from hf_drafthead.modeling import DraftHeadConfig
from hf_drafthead.modeling.config import BASE_FOLDER
from hf_drafthead.modeling.families import BY_MODEL_TYPE
from hf_drafthead.modeling.files import HTTP_ERROR, in_one_line, is_local, read_tensors

# Left here: the state of a training, caches, pickles (which run code when they are opened), what holds keys.
LEFT = ["optimizer*", "scheduler.*", "rng_state*", "trainer_state.json", "checkpoint-*", "global_step*", "run.json"]
LEFT += ["events.out.tfevents*", "wandb", "mlruns", "clock.json", "__pycache__", ".*", "*.lock", "*.incomplete"]
LEFT += ["*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.joblib", "*.pyc", "*.pem", "*.key", "id_rsa*"]
LEFT += ["id_ed25519*", "token", "stored_tokens", "credentials*", "*.tmp"]
ADAPTERS = f"{BASE_FOLDER}/*/adapter_*"  # of the base, one in each folder
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt")  # any string may be a word of a vocabulary
SECRET = re.compile(
    rb"\bhf_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_-]{20,}|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{36}"
    rb"|\bgithub_pat_\w{22,}|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^\s/:@]+:[^\s/@]+@"
)
WAYS = "name it on the Hub (--base ORG/NAME, or model.config.base_model_name_or_path = 'org/name'), or push it along "
WAYS += "with its heads (--include-base, or include_base=True)"
TEXT_AT_MOST = 16 * 2**20  # bytes; larger files are not text written by people


def sort_files(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Every file of a folder that is sent, by its path there, and what is left behind; both in alphabetical order."""
    sent, behind = {}, set()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".gitattributes"):
        parts = path.relative_to(folder).parts
        marks = [depth for depth, part in enumerate(parts, 1) if any(fnmatch(part, pattern) for pattern in LEFT)]
        if marks:
            behind.add("/".join(parts[: marks[0]]))
        else:
            sent["/".join(parts)] = path
    return sent, sorted(behind)


def check_files(folder: Path) -> None:
    """Refuse secrets in the files that are sent."""
    signed_in = (get_token() or "").encode()
    for name, path in sort_files(folder)[0].items():
        if path.name in VOCABULARIES or path.suffix == ".safetensors" or path.stat().st_size > TEXT_AT_MOST:
            continue
        data = path.read_bytes()
        match = SECRET.search(data)
        if match or (signed_in and signed_in in data):
            line = data.count(b"\n", 0, match.start() if match else data.index(signed_in)) + 1
            raise ValueError(
                f"{name!r} in {str(folder)!r} holds what looks like a token, password or private key (line {line}): "
                "remove it, and revoke it if anybody may have seen it."
            )


def check_base(config: DraftHeadConfig, folder: Path, token: str | bool | None, private: bool) -> list[str]:
    """Refuse heads whose base others cannot load: a path, a private one, or one that is not there; notes."""
    name, revision = config.base_model_name_or_path, config.base_model_revision
    if config.base_included:
        if name == BASE_FOLDER and not (folder / name).is_dir():
            raise ValueError(f"the base of these heads is to lie in {str(folder / name)!r}, which is not there.")
        return []
    if not name:
        raise ValueError(f"the heads do not say which base they are for: {WAYS}.")
    if is_local(name, folder):
        raise ValueError(f"the base of these heads is the local path {name!r}, which others cannot load: {WAYS}.")
    info, notes = find_base(name, revision, token)
    if info is not None and info.private and not private:
        raise ValueError(
            f"the base {name!r} is private, so that others cannot load these heads: push them to a private repository "
            f"(private=True, --private), or {WAYS}."
        )
    if info is not None and info.private:
        notes.append(f"the base {name!r} is private: only users with access to it can load these heads")
    if info is not None and info.gated:
        notes.append(f"the base {name!r} is gated: users of these heads need access to it")
    return notes


def find_base(name: str, revision: str | None, token: str | bool | None) -> tuple[ModelInfo | None, list[str]]:
    """What the Hub says about a base; None, and a note that says why, where it cannot be asked."""
    try:
        return HfApi(token=token).model_info(name, revision=revision), []
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise OSError(f"there is no base {name!r} on the Hub ({in_one_line(error)}): {WAYS}.") from error
    except (HTTP_ERROR, OSError) as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in (401, 403):
            raise
        why = f"the Hub answered {status}" if status else f"{type(error).__name__}: the Hub could not be reached"
        return None, [f"the base {name!r} was not looked up ({why})"]


def check_weights(folder: Path, config: DraftHeadConfig) -> None:
    """Refuse heads, or a base beside them, that are not finite, and heads that are not those of their config."""
    heads, beside = read_tensors(str(folder)), folder / BASE_FOLDER
    base = read_tensors(str(beside)) if (beside / "config.json").is_file() else {}
    for name, tensor in (heads | {f"{BASE_FOLDER}/{name}": tensor for name, tensor in base.items()}).items():
        if tensor.is_floating_point() and tensor.itemsize > 1 and not torch.isfinite(tensor).all():
            raise ValueError(
                f"the tensor {name!r} in {str(folder)!r} holds NaN or infinity: train these heads again, or use an "
                "earlier checkpoint."
            )
    BY_MODEL_TYPE[config.model_type]._heads_alone(str(folder), config, heads)  # as others will load them
