"""The destination of a push: what the repository holds, whether heads may be pushed there, and errors of the Hub."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, ModelInfo, errors, hf_hub_download
from huggingface_hub.utils import validate_repo_id

from hf_drafthead.modeling.checkpoint import HTTP_ERROR, why_refused
from hf_drafthead.modeling.config import MODEL_TYPE_PREFIX
from hf_drafthead.modeling.files import first_line, read_json

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
    tags: list[str] | None = None
    license: str | None = None
    include_base: bool | None = None
    max_shard_size: int | str = "50GB"

    def __post_init__(self) -> None:
        try:
            validate_repo_id(self.repo_id)
        except errors.HFValidationError as error:
            raise ValueError(
                f"{self.repo_id!r} is not a valid repository name ({first_line(error)}): expected 'name' or "
                "'org/name', of letters, digits, '-', '_' and '.'."
            ) from None


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
    """A file of a repository, here; None if it has none: transformers takes one that is refused for a missing one.

    Raises:
        OSError: the Hub does not give it out.
    """
    try:
        return Path(hf_hub_download(repo_id, name, revision=revision, token=token))
    except (errors.RemoteEntryNotFoundError, errors.HFValidationError):  # a path that was one when the model was loaded
        return None
    except (HTTP_ERROR, OSError) as error:
        at = f" at {revision!r}" if revision else ""
        refused = why_refused(error) or first_line(error)
        raise OSError(f"{name} of {repo_id!r}{at} cannot be fetched: {refused}.") from error


def look(target: Target) -> Destination:
    """Ask the Hub about the repository that a push goes to; `told` turns errors of huggingface_hub into one line."""
    api = HfApi(token=target.token)
    repo_id = target.repo_id
    if "/" not in repo_id:  # the Hub would look for it among the models that have no owner
        repo_id = f"{api.whoami()['name']}/{repo_id}"
    try:
        info = api.model_info(repo_id, revision=target.revision)
    except errors.GatedRepoError:
        raise
    except errors.RepositoryNotFoundError:
        return Destination(repo_id, None, target.token)
    except errors.RevisionNotFoundError:
        if (target.revision or "").startswith("refs/pr"):
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
    if config is None:
        if weights := [name for name in there.files if OF_A_MODEL.fullmatch(name)]:
            raise ValueError(
                f"{there.repo_id!r} holds another model ({weights[0]}), whose card the heads' would replace: push them "
                "to a repository of their own."
            )
        return
    try:
        model_type = read_json(config).get("model_type")
    except OSError:
        model_type = None
    if not str(model_type).startswith(MODEL_TYPE_PREFIX):
        raise ValueError(
            f"{there.repo_id!r} holds a {model_type!r} model without draft heads, which the heads would overwrite: "
            "push them to a repository of their own."
        )


@contextmanager
def told(target: Target, sending: bool = False) -> Iterator[None]:
    """Turn what the Hub answers into one line that says what was refused, and what to do.

    Args:
        target: of the push.
        sending: whether files are on their way, so that a RuntimeError is huggingface_hub's word for a broken upload.
    """
    owner = target.repo_id.rpartition("/")[0]
    try:
        yield
    except errors.RevisionNotFoundError as error:
        raise OSError(f"{target.repo_id!r} has no revision {target.revision!r}: push to a branch.") from error
    except errors.BadRequestError as error:
        raise ValueError(f"the Hub refused what was sent to {target.repo_id!r}: {first_line(error)}") from error
    except (errors.HfHubHTTPError, errors.LocalTokenNotFoundError) as error:
        status = getattr(getattr(error, "response", None), "status_code", 401)  # 401: there is no token to be sent
        answer = getattr(error, "server_message", None) or first_line(error)
        if status == 401:
            line = (
                f"the Hub could not authenticate the push to {target.repo_id!r} ({answer}): sign in with "
                "`hf auth login`, or pass a valid token."
            )
        elif status == 403:
            line = (
                f"the token may not write to {target.repo_id!r} ({answer}): use one with write access"
                f"{f' for {owner!r}' if owner else ''}"
                f"{'' if target.create_pr else ', or propose the change (create_pr=True, --create-pr)'}."
            )
        elif isinstance(error, errors.RepositoryNotFoundError):
            line = f"there is no repository {target.repo_id!r} that the token can see: check the name and the token."
        else:
            line = f"the Hub answered {status} to the push to {target.repo_id!r} ({answer}): push again later."
        raise OSError(line) from error
    except (HTTP_ERROR, RuntimeError) as error:  # a broken connection is no OSError for the client of HTTP
        if isinstance(error, RuntimeError) and not sending:
            raise
        raise OSError(
            f"the push to {target.repo_id!r} was interrupted ({type(error).__name__}: {first_line(error)}): push "
            "again; files that were uploaded are not sent twice."
        ) from error
