"""A summary of a draft-head checkpoint, read from its files without loading the base."""

import math
import os
from dataclasses import dataclass, fields
from typing import Any

import torch
from huggingface_hub import get_safetensors_metadata
from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError
from transformers.configuration_utils import PreTrainedConfig

from hf_drafthead.cards.facts import BYTES
from hf_drafthead.evaluation.calls import drafted
from hf_drafthead.evaluation.loading import one_line, read_heads_config
from hf_drafthead.generation.entries import device_name
from hf_drafthead.generation.settings import AUTO, DraftSettings
from hf_drafthead.generation.tree import DraftTree, resolve
from hf_drafthead.modeling.checkpoint import HTTP_ERROR, checkpoint_files, read_generation_settings, why_refused
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.files import in_one_line, open_tensors


@dataclass(frozen=True)
class Summary:
    """One checkpoint: its family, its base, the size of its heads, and how they draft."""

    model: str
    family: str
    base: str | None
    base_type: str
    base_revision: str | None
    base_included: bool
    draft_heads: int
    parameters: int  # of the drafter
    memory: int  # bytes that the drafter adds to the base, in the type it is stored in
    dtype: str
    fields: dict[str, Any]  # the family's own config fields
    settings: dict[str, Any]  # the drafting settings of the generation config
    tree: DraftTree | None

    def to_json(self) -> dict[str, Any]:
        """All fields; the tree as its rank paths."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        paths = None if self.tree is None else [list(path) for path in self.tree.paths]
        return {**plain, "tree": paths, "tree_nodes": None if self.tree is None else self.tree.num_nodes}


def summarize(name: str) -> Summary:
    """Read a checkpoint's config, its generation config and the headers of its weights.

    Args:
        name: its folder, or its id on the Hub.

    Raises:
        OSError, ValueError: as `read_heads_config` does, or its weights cannot be read.
    """
    config = read_heads_config(name)
    settings = drafting_settings(name)
    tensors = {key: value for key, value in tensor_headers(name).items() if not key.startswith("base.")}
    sizes = {key: math.prod(shape) for key, (shape, _) in tensors.items()}
    text_config = config.get_text_config()
    chosen = settings.get("draft_tree")
    drafted_tree = None if chosen in (None, AUTO) else resolve(chosen, config.max_depth, text_config.vocab_size)
    return Summary(
        model=name,
        family=config.family,
        base=config.base_model_name_or_path,
        base_type=text_config.model_type,
        base_revision=config.base_model_revision,
        base_included=config.base_included,
        draft_heads=config.num_draft_heads,
        parameters=sum(sizes.values()),
        memory=sum(size * BYTES.get(tensors[key][1], 1) for key, size in sizes.items()),
        dtype=", ".join(sorted({dtype for _, dtype in tensors.values()})),
        fields=family_fields(config),
        settings=settings,
        tree=drafted_tree if isinstance(drafted_tree, DraftTree) else None,
    )


@dataclass(frozen=True)
class Probe:
    """Heads tried on their base.

    drafts: whether `generate` uses the heads at all, or the base decodes by itself; why_not: the reason if it does
    not; base_parameters: of the base; memory: bytes of the weights of base and heads together; device, dtype: of the
    base.
    """

    drafts: bool
    why_not: str | None
    base_parameters: int
    memory: int
    device: str
    dtype: str


def try_on_base(model: Any) -> Probe:
    """Draft a few tokens with loaded heads.

    Args:
        model: a model with draft heads, in eval mode.
    """
    prompt = torch.arange(1, 5, device=model.base.device)[None]
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **settings)
    drafts = drafted(output)
    return Probe(
        drafts=drafts,
        why_not=None if drafts else model.why_no_drafts() or "see the warning",
        base_parameters=sum(parameter.numel() for parameter in model.base.parameters()),
        memory=sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        device=device_name(model.base.device),
        dtype=str(model.base.dtype).removeprefix("torch."),
    )


def family_fields(config: DraftHeadConfig) -> dict[str, Any]:
    """The config fields that this family adds to what all have; of another config only the kind of model."""
    added = config.heads_fields() - DraftHeadConfig.heads_fields()
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name in added}
    return {name: value.model_type if isinstance(value, PreTrainedConfig) else value for name, value in values.items()}


def drafting_settings(name: str) -> dict[str, Any]:
    """The drafting settings of the checkpoint's generation config; empty if it has none."""
    return DraftSettings.stored_in(read_generation_settings(name, {}))


def tensor_headers(name: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of every tensor of a checkpoint; from the Hub only the headers are fetched.

    Raises:
        OSError: there are no weights as safetensors, or they cannot be read.
    """
    if not os.path.isdir(name):
        try:
            files = get_safetensors_metadata(name).files_metadata.values()
        except NotASafetensorsRepoError:
            raise OSError(
                f"{name!r} holds no weights as safetensors: a pickle is never opened, for it can run code; ask its "
                "author to save the heads as safetensors."
            ) from None
        except SafetensorsParsingError as error:
            raise OSError(f"the weights of {name!r} cannot be read ({one_line(error)}): ask its author.") from None
        except HTTP_ERROR as error:
            raise OSError(f"the weights of {name!r} cannot be read: {why_refused(error)}.") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # a damaged index or header
            raise OSError(f"the weights of {name!r} cannot be read ({in_one_line(error)}): ask its author.") from error
        return {key: (tuple(info.shape), str(info.dtype)) for file in files for key, info in file.tensors.items()}
    headers = {}
    for file in checkpoint_files(name, None, {}):
        with open_tensors(file) as tensors:
            for key in tensors.keys():
                piece = tensors.get_slice(key)
                headers[key] = (tuple(piece.get_shape()), str(piece.get_dtype()))
    return headers
