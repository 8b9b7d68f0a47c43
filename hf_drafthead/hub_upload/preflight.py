"""The checks of a push, before anything is sent."""

import re
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import cast

import torch
from huggingface_hub import HfApi, ModelInfo, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from torch import Tensor

from hf_drafthead.cards import missing
from hf_drafthead.modeling import DraftHeadConfig, DraftHeadPreTrainedModel
from hf_drafthead.modeling.base_model import is_local
from hf_drafthead.modeling.checkpoint import HTTP_ERROR, INDEX, WEIGHTS, read_heads_config, read_tensors
from hf_drafthead.modeling.config import BASE_FOLDER
from hf_drafthead.modeling.families import BY_MODEL_TYPE
from hf_drafthead.modeling.mtp import modules_counted

TRAINING = ["optimizer*", "scheduler.*", "scaler.pt", "rng_state*", "training_args.bin", "trainer_state.json"]
TRAINING += ["checkpoint-*", "global_step*", "events.out.tfevents*", "wandb", "mlruns", "run.json", "clock.json"]
CACHES = ["__pycache__", ".cache", ".git", ".ipynb_checkpoints", ".*_cache", "*.pyc", "*.lock", "*.incomplete", "*.tmp"]
PICKLES = ["*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.joblib"]
PRIVATE = [".env*", ".netrc", ".git-credentials", ".pypirc", ".npmrc", "*.pem", "*.key", "id_rsa*", "id_ed25519*"]
PRIVATE += ["token", "stored_tokens", "credentials*"]
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt")  # any string may be a word of a vocabulary
SECRET = re.compile(
    rb"\bhf_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_-]{20,}|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{36}"
    rb"|\bgithub_pat_\w{22,}|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^\s/:@]+:[^\s/@]+@"
)
WAYS = "name it on the Hub (--base ORG/NAME, or model.config.base_model_name_or_path = 'org/name'), or push it along "
WAYS += "with its heads (--include-base, or include_base=True)"
TEXT_AT_MOST = 16 * 2**20  # bytes; larger files are not text written by people


def sort_files(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Every file of a folder that may be sent, by its path there, and what is the state of a training and left behind.

    Both are in alphabetical order; the file that git hosts write is in neither.
    """
    sent, behind = {}, set()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".gitattributes"):
        parts = path.relative_to(folder).parts
        marks = [depth for depth, part in enumerate(parts, 1) if any(fnmatch(part, pattern) for pattern in TRAINING)]
        if marks:
            behind.add("/".join(parts[: marks[0]]))
        else:
            sent["/".join(parts)] = path
    return sent, sorted(behind)


def check_files(folder: Path) -> None:
    """Refuse files that do not belong in a repository: caches, pickles, secrets, and weights that would not be read.

    The state of a training is not checked, since it is not sent.
    """
    if (folder / INDEX).is_file() and (folder / WEIGHTS).is_file():
        raise ValueError(
            f"{str(folder)!r} holds {WEIGHTS} and {INDEX}, and only the first would be read: remove the one that is "
            "not wanted."
        )
    kinds = (
        (PRIVATE, "looks like a secret", "remove it from the folder"),
        (CACHES, "belongs to a cache", "remove it from the folder"),
        (PICKLES, "is a pickle, which can run code when it is opened", "save the weights as safetensors instead"),
    )
    signed_in = (get_token() or "").encode()
    for name, path in sort_files(folder)[0].items():
        for patterns, what, advice in kinds:
            if any(fnmatch(part, pattern) for part in Path(name).parts for pattern in patterns):
                raise ValueError(f"{name!r} in {str(folder)!r} {what} and is not published: {advice}.")
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


def check_public_base(config: DraftHeadConfig, folder: Path, token: str | bool | None) -> list[str]:
    """Refuse heads whose base others cannot load: a local path, or one that the Hub does not have.

    Returns:
        Notes about the base: that it is gated, private, or was not looked up.
    """
    if config.base_included:
        return []
    name, revision = config.base_model_name_or_path, config.base_model_revision
    if not name:
        raise ValueError(f"the heads do not say which base they are for: {WAYS}.")
    if is_local(name, folder):
        raise ValueError(f"the base of these heads is the local path {name!r}, which others cannot load: {WAYS}.")
    info, notes = find_base(name, revision, token)
    if info is not None and info.gated:
        notes.append(f"the base {name!r} is gated: users of these heads need access to it")
    if info is not None and info.private:
        notes.append(f"the base {name!r} is private: only users with access to it can load these heads")
    return notes


def check_modules(config: DraftHeadConfig) -> None:
    """Refuse a base that would lose its modules for multi-token prediction: transformers drops them on loading."""
    counted = modules_counted(config.get_text_config())
    if config.base_included and counted and config.family != "mtp":
        raise ValueError(
            f"the base's config counts {counted} module(s) for multi-token prediction, which the weights of a loaded "
            "base no longer hold: push the heads alone, or as family 'mtp' with its base, which has them."
        )


def find_base(name: str, revision: str | None, token: str | bool | None) -> tuple[ModelInfo | None, list[str]]:
    """What the Hub says about a base; None, and a note that says why, where it cannot be asked.

    Raises:
        OSError: there is no such base, or not at that revision.
        ValueError: the name cannot be one of a repository.
    """
    try:
        return HfApi(token=token).model_info(name, revision=revision), []
    except HFValidationError:
        raise ValueError(f"{name!r} is not a valid name of a base on the Hub: {WAYS}.") from None
    except RepositoryNotFoundError as error:
        raise OSError(
            f"there is no base {name!r} on the Hub (or it is private and the token cannot see it): {WAYS}."
        ) from error
    except RevisionNotFoundError as error:
        raise OSError(
            f"the base {name!r} has no revision {revision!r}: set base_model_revision to a commit that it has."
        ) from error
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise
        return None, [f"the base {name!r} was not looked up: the Hub answered {error.response.status_code}"]
    except (HTTP_ERROR, OSError) as error:
        return None, [f"the base {name!r} was not looked up ({type(error).__name__}: the Hub could not be reached)"]


def check_weights(folder: Path, live: Mapping[str, Tensor] | None = None) -> None:
    """Refuse weights that are not finite, or that do not load again to the same tensors, `live` ones included."""
    loaded: dict[str, Tensor] | None = None
    heads = read_tensors(str(folder))
    beside = folder / BASE_FOLDER
    base = read_tensors(str(beside)) if (beside / "config.json").is_file() else {}
    for name, tensor in (heads | {f"{BASE_FOLDER}/{name}": tensor for name, tensor in base.items()}).items():
        if not torch.isfinite(tensor).all():
            raise ValueError(
                f"the tensor {name!r} in {str(folder)!r} holds NaN or infinity: train these heads again, or use an "
                "earlier checkpoint."
            )
        if name not in heads:
            continue
        if loaded is None:
            loaded = dict(load_again(folder, tensor.dtype).state_dict())
        for other, where in ((loaded, "when it is loaded again"), (live, "than in the model that was saved")):
            if other is not None and not same_tensor(tensor, other.get(name)):
                raise ValueError(f"the tensor {name!r} in {str(folder)!r} is another {where}: save the model again.")


def load_again(folder: Path, dtype: torch.dtype) -> DraftHeadPreTrainedModel:
    """The checkpoint as others will load it; heads alone are loaded without their base."""
    config = read_heads_config(str(folder))
    family = BY_MODEL_TYPE[config.model_type]
    if config.base_included:
        return cast(DraftHeadPreTrainedModel, family.from_pretrained(folder, dtype="auto"))
    # The code of the base may be remote, so that not even its shapes could be built here.
    return cast(DraftHeadPreTrainedModel, family._heads_alone(str(folder), config, None, {}, None)[0].to(dtype))


def check_card(folder: Path, shown: str) -> None:
    """Refuse a card that lacks necessary information; messages name the folder as `shown`."""
    if lacking := missing(folder):
        words = "; ".join(line.replace(str(folder), shown) for line in lacking)
        raise ValueError(
            f"the card of {shown!r} is not complete: {words} (license= and --license of a push write the license)."
        )


def same_tensor(stored: Tensor | None, other: Tensor | None) -> bool:
    """Whether a stored tensor is another, apart from its type; None is no other."""
    if stored is None or other is None or other.shape != stored.shape:
        return False
    return torch.equal(stored.to(other.dtype), other.detach().cpu())
