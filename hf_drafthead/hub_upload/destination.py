"""The destination of a push: what the repository holds, whether heads may be pushed there, and errors of the Hub."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path

from huggingface_hub import HfApi, ModelInfo, errors, hf_hub_download

from hf_drafthead.modeling.config import MODEL_TYPE_PREFIX
from hf_drafthead.modeling.files import HTTP_ERROR, in_one_line, read_json, refusing

# What makes a repository one of a model: its weights in any form, or what says where they lie.
OF_A_MODEL = re.compile(
    r".*\.(safetensors|bin|gguf|pth?|ckpt|onnx|h5|msgpack)|(.*/)?(adapter_config|model_index)\.json"
)


@dataclass(frozen=True)
class Target:
    """The destination and the options of a push, named as in transformers."""

    repo_id: str
    commit_message: str | None = None
    commit_description: str | None = None
    private: bool | None = None
    token: str | bool | None = None
    revision: str | None = None
    create_pr: bool = False
    tags: str | list[str] | None = None
    license: str | None = None
    include_base: bool | None = None
    max_shard_size: int | str = "50GB"


@dataclass(frozen=True)
class Destination:
    """The repository before a push: its name with its owner, and what the Hub says of the branch that is pushed to.

    That is of main if there is no such branch yet, and None if there is no repository.
    """

    repo_id: str
    info: ModelInfo | None = None
    token: str | bool | None = None

    @property
    def files(self) -> list[str]:
        """The paths of all its files."""
        return [file.rfilename for file in self.info.siblings or []] if self.info else []

    def fetch(self, name: str) -> Path | None:
        """A file of it, here; None if it holds no such file."""
        if self.info is None or name not in self.files:
            return None
        return download(self.info.id, name, self.info.sha, self.token)


def download(repo_id: str, name: str, revision: str | None, token: str | bool | None) -> Path | None:
    """A file of a repository, here; None if it has none: transformers takes one that is refused for a missing one."""
    none = suppress(errors.RemoteEntryNotFoundError, errors.HFValidationError)  # a path, when the model was loaded
    with refusing(OSError, f"{name} of {repo_id!r} cannot be fetched", of=(HTTP_ERROR, OSError)), none:
        return Path(hf_hub_download(repo_id, name, revision=revision, token=token))
    return None


def look(target: Target) -> Destination:
    """Ask the Hub about the repository that a push goes to."""
    api, repo_id = HfApi(token=target.token), target.repo_id
    proposal = (target.revision or "").startswith("refs/pr")  # which has to be there
    if "/" not in repo_id:  # the Hub would look for it among the models that have no owner
        repo_id = f"{api.whoami()['name']}/{repo_id}"
    try:
        info = api.model_info(repo_id, revision=target.revision)
    except errors.RepositoryNotFoundError as error:
        if proposal or isinstance(error, errors.GatedRepoError):
            raise
        return Destination(repo_id, None, target.token)
    except errors.RevisionNotFoundError:
        if proposal:
            raise
        info = api.model_info(repo_id)  # a new branch starts there
    return Destination(repo_id, info, target.token)


def check_destination(there: Destination, target: Target, base: str | None) -> None:
    """Refuse a repository in which heads would destroy another model, or be seen by others than was asked for."""
    if base is not None and base.lower() in (there.repo_id.lower(), there.info.id.lower() if there.info else ""):
        raise ValueError(
            f"{there.repo_id!r} is the repository of the base, which the heads would overwrite: push them to another."
        )
    if there.info is None:
        return
    if target.private is not None and there.info.private is not None and there.info.private != target.private:
        words = ("public", "private")
        raise ValueError(
            f"{there.repo_id!r} is {words[there.info.private]} already, and {words[target.private]} was asked for: "
            "change it in its settings on the Hub, or leave private= (--private, --public) out."
        )
    config = there.fetch("config.json")
    held = next(filter(OF_A_MODEL.fullmatch, there.files), None) if config is None else "config.json"
    try:
        model_type = None if config is None else read_json(config).get("model_type")
    except OSError:
        model_type = None
    if held is not None and not str(model_type).startswith(MODEL_TYPE_PREFIX):
        kind = "another model" if config is None else f"a {model_type!r} model without draft heads"
        raise ValueError(
            f"{there.repo_id!r} holds {kind} ({held}), which the heads would overwrite: push them to a repository of "
            "their own."
        )


@contextmanager
def told(target: Target) -> Iterator[None]:
    """Say in one line what the Hub answers, or that it could not be reached."""
    try:
        yield
    except (HTTP_ERROR, errors.LocalTokenNotFoundError, ConnectionError, JSONDecodeError) as error:
        answer = getattr(error, "server_message", None) or in_one_line(error)
        advice = "push again; what was uploaded is not sent twice."
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403) or isinstance(error, errors.LocalTokenNotFoundError):
            advice = "log in (`hf auth login`, token=) as who may write there, or propose it (create_pr=, --create-pr)."
        raise OSError(f"the push to {target.repo_id!r} failed ({answer}): {advice}") from error
