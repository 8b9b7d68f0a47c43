"""The base of a set of heads: where it lies, whether it is the right one and still what it was, and loading it."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, cached_file, extract_commit_hash, logging

from hf_drafthead.modeling.adapters import ADAPTER_WEIGHTS, find_adapter, is_of_a_whole_model, load_adapter, plain_state
from hf_drafthead.modeling.checkpoint import (
    HTTP_ERROR,
    NO_OPTIONS,
    checkpoint_files,
    fetch_file,
    is_missing_folder,
)
from hf_drafthead.modeling.config import MODEL_TYPE_PREFIX, DraftHeadConfig
from hf_drafthead.modeling.files import in_one_line, read_json
from hf_drafthead.modeling.gguf_files import beside, gguf_arguments, load_tokenizer, reading_gguf, split_gguf

logger = logging.get_logger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tekken.json")
GIVE_BASE = "pass base_model= (in a shell --base-model) with its id, path or object."
# For decoder-only models; transformers lists some of those that hear beside models with an encoder and a decoder.
SEE_OR_HEAR = (AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM)
OF_CONFIG = ("gguf_file", "trust_remote_code", "code_revision")  # arguments by which a config is found
SAMPLES = 16  # values of a tensor by which it is known again
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack"}
COMPARED = 1 << 24  # values that are compared with a file at a time
# fields of a config by which a model computes nothing else
NOT_COMPUTED = {"dtype", "torch_dtype", "architectures", "transformers_version", "_name_or_path", "use_cache"}
NOT_COMPUTED |= {"auto_map", "quantization_config", "output_hidden_states", "output_attentions", "return_dict"}
NOT_COMPUTED |= {"tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id"}
NOT_COMPUTED |= {"problem_type"}


def load_named(
    name: str,
    hub: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    checkpoint: str | None = None,
    config: DraftHeadConfig | None = None,
) -> tuple[Any, dict[str, Any]]:
    """A base for fresh heads, or the one that the heads of a checkpoint (with its config) run on; and its origin."""
    name, file = split_gguf(name)
    called, wanted = f"the base {name!r}", "give the id or path of a causal language model."
    if checkpoint is not None:
        called, wanted = f"{called} of {checkpoint!r}", GIVE_BASE
    if is_missing_folder(name):
        raise OSError(f"{called} was not found (there is no such folder): {wanted}")
    hub = {key: value for key, value in hub.items() if value is not None}
    arguments = gguf_arguments(name, {**arguments, "gguf_file": file} if file else arguments, hub)
    file, place = arguments.get("gguf_file"), name
    try:
        adapter = find_adapter(name, hub)
        if adapter is not None and fetch_file(name, CONFIG_NAME, hub) is None:
            place, hub = _base_of_adapter(adapter, hub)
        else:
            adapter = None  # a folder that holds both: transformers loads the two
        with reading_gguf(file):
            of_config = {key: arguments[key] for key in OF_CONFIG if arguments.get(key) is not None}
            base_config = AutoConfig.from_pretrained(place, **of_config, **hub)
    except (OSError, ValueError) as error:  # ValueError: a folder that holds no model
        raise OSError(
            f"{called} cannot be read ({in_one_line(error)}{'' if file else beside(name)}): {wanted}"
        ) from error
    refuse_unfit(base_config, place, loaded=False)
    commit = commit_of(place, hub, file or CONFIG_NAME)
    if config is not None:
        check_base(config, base_config, place)
        if commit and config.base_model_revision and commit != config.base_model_revision:
            logger.warning_once(
                f"these heads were trained on {config.base_model_name_or_path!r} at {config.base_model_revision}; "
                f"the base is {place!r} at {commit}: fewer guesses may be accepted."
            )
    hub = {**hub, "revision": commit or hub.get("revision")}
    try:
        with reading_gguf(file):
            base = (auto_class(base_config) or AutoModelForCausalLM).from_pretrained(place, **hub, **arguments)
    except (OSError, HTTP_ERROR, SafetensorError) as error:
        raise OSError(f"{called} cannot be read ({in_one_line(error)}): {wanted}") from error
    if file is not None:
        base.name_or_path = base.config.name_or_path = place  # transformers takes the title that is in the file
    if adapter is not None:
        load_adapter(base, adapter)
    origin = {"base_model_name_or_path": full_name(place), "base_model_revision": commit, "base_gguf_file": file}
    return base, {**origin, "base_subfolder": hub.get("subfolder") or None}


def _base_of_adapter(folder: str, hub: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Where the base of an adapter lies, and how it is fetched; a ValueError if the adapter does not say it."""
    config = read_json(Path(folder) / ADAPTER_CONFIG_NAME)
    if not (name := config.get("base_model_name_or_path")):
        raise ValueError(f"the adapter in {folder!r} does not say which base it is for: load the two yourself")
    fetch = {key: value for key, value in hub.items() if key != "subfolder"}
    return str(name), {**fetch, "revision": config.get("revision") or "main"}


def locate_base(config: DraftHeadConfig, checkpoint: str) -> str:
    """Name of the base that the config asks for: a Hub id, or a path, made absolute from the checkpoint's folder."""
    name = config.base_model_name_or_path
    if not name:
        raise OSError(f"{checkpoint!r} does not say which base it was trained for: {GIVE_BASE}")
    inside = Path(checkpoint) / name
    if inside.is_dir():
        return str(inside.resolve())
    if os.path.isabs(name) or name.startswith("."):
        raise OSError(f"the base of {checkpoint!r} was not found at {str(inside)!r}: {GIVE_BASE}")
    return name


def check_base(config: DraftHeadConfig, base_config: PreTrainedConfig, name: str) -> None:
    """Refuse a base of another model type, hidden size or vocabulary than the heads were made for."""
    wanted, base_text = config.get_text_config(), base_config.get_text_config()
    trained_for = config.base_model_name_or_path or "another base"
    for field, words in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary"), ("model_type", "model type")):
        want, have = getattr(wanted, field, None), getattr(base_text, field, None)
        if want is not None and want != have:
            raise ValueError(
                f"these heads were trained for {trained_for!r} ({words} {want}); the base at {name!r} has {words} "
                f"{have}: load the first (base_revision= is its commit), or train heads for the second."
            )


def fetch_config(name: str, revision: str | None, token: str | bool | None, **hub: Any) -> PreTrainedConfig:
    """The config of a base at a Hub id or folder, without running code that may lie beside it."""
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name, revision=revision or "main", token=token, **hub)
    except (OSError, HTTP_ERROR) as error:
        raise OSError(f"config.json of the base {name!r} cannot be fetched ({in_one_line(error)}).") from error
    model_type = fields.get("model_type")
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type].from_dict(fields)
    config = PreTrainedConfig.from_dict(fields)
    config.model_type = model_type
    return config


def last_layer(base: Any) -> tuple[torch.device, torch.dtype]:
    """Device and compute dtype of the base's lm_head."""
    head = base.get_output_embeddings()
    device = getattr(getattr(head, "_hf_hook", None), "execution_device", None)
    device = _weight(head).device if device is None else device
    dtype = _weight(head).dtype
    if not dtype.is_floating_point or dtype.itemsize < 2:  # a quantized lm_head
        dtype = base.dtype
    return torch.device(device), dtype


def _weight(head: Any) -> Any:
    """The weight of a layer; torch's quantized layers have a function there."""
    return head.weight() if callable(head.weight) else head.weight


def width_of(base: Any) -> int | None:
    """How wide the states are that the base's lm_head reads, where that is not its hidden_size; else None."""
    head = base.get_output_embeddings()
    width = getattr(head, "in_features", None) or _weight(head).shape[-1]
    return None if width == base.config.get_text_config(decoder=True).hidden_size else width


def refuse_unfit(config: PreTrainedConfig, name: str, loaded: bool) -> None:
    """Refuse a base whose own `generate` draft heads could not reproduce: with heads, an encoder, or no text."""
    if str(config.model_type).startswith(MODEL_TYPE_PREFIX):
        raise ValueError(f"{name!r} has draft heads already: give their base alone.")
    remote = bool(getattr(config, "auto_map", None)) or config.model_type not in CONFIG_MAPPING
    if config.is_encoder_decoder if loaded else not (remote or auto_class(config)):
        kind = "an encoder-decoder" if config.is_encoder_decoder else "no language"
        raise ValueError(
            f"{name!r} is {kind} model ({config.model_type}): draft heads need a decoder-only language model, as "
            "AutoModelForCausalLM, AutoModelForImageTextToText or AutoModelForMultimodalLM loads it."
        )


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that loads a base, which may also see or hear; None for what continues no text."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if config.is_encoder_decoder:
        return None
    return next((kind for kind in SEE_OR_HEAR if type(config) in kind._model_mapping), None)


def refuse_loading_arguments(base: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse what only matters while a base is loaded, and would be ignored with a loaded one, by a TypeError."""
    dtypes = ("auto", base.dtype, str(base.dtype).removeprefix("torch."))
    harmless: dict[str, Any] = {"dtype": dtypes, "torch_dtype": dtypes, "trust_remote_code": (True, False)}
    for name in ("attn_implementation", "experts_implementation"):
        harmless[name] = (getattr(base.config, f"_{name}", None),)
    for name, value in arguments.items():
        if value is not None and value not in harmless.get(name, ()):
            raise TypeError(
                f"{name}={value!r} is for loading a base, but the base given is a loaded {type(base).__name__}: "
                "set it when the base is loaded."
            )


def full_name(name: str) -> str:
    """The name of a base, wherever it will be read: a path is made absolute."""
    return str(Path(name).resolve()) if os.path.isdir(name) else name


def is_local(name: str, checkpoint: str | os.PathLike) -> bool:
    """Whether the name of a base, as the config of a checkpoint gives it, is a path and no Hub id."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return (Path(checkpoint) / name).is_dir()


def commit_of(name: str, hub: Mapping[str, Any], of_file: str = CONFIG_NAME) -> str | None:
    """The commit that a Hub id and revision resolve to, by a file that it has; None for a local folder."""
    if os.path.isdir(name):
        return None
    return extract_commit_hash(cached_file(name, of_file, _raise_exceptions_for_missing_entries=False, **hub), None)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer."""
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


def copy_tokenizer(name: str | None, folder: Path, gguf_file: str | None, hub: Mapping[str, Any]) -> bool:
    """Save the tokenizer of a base in a folder that has none; returns whether the folder has one."""
    if has_tokenizer(folder):
        return True
    if not name or is_missing_folder(name):
        return False
    quiet = {**hub, "_raise_exceptions_for_connection_errors": not hub.get("local_files_only")}
    if gguf_file is None and not any(fetch_file(name, file, quiet) for file in TOKENIZER_FILES):
        return False
    try:
        load_tokenizer(name, gguf_file, **hub).save_pretrained(folder)
    except (HTTP_ERROR, OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise ValueError(f"the tokenizer of {name!r} cannot be loaded: {in_one_line(error)}") from error
    return True


class Fingerprint:
    """What a base was when it was loaded: of each tensor the count of its writes, and a few values where no file that
    its name names holds it, with which it could be compared as a whole."""

    def __init__(self, base: Any, config: DraftHeadConfig) -> None:
        stored = {name for file in _files_of(base, config) or () for name in _stored_names(file)}
        self.tensors = {
            name: (*_form(tensor), None if name in stored else _sample(tensor))
            for name, tensor in plain_state(base).items()
        }

    def change(self, state: Mapping[str, Tensor]) -> str | None:
        """Which of these tensors is not as it was; None if all are."""
        for name, tensor in state.items():
            (*form, writes, values), (*form_now, writes_now), now = self.tensors[name], _form(tensor), _sample(tensor)
            if form != form_now:
                return f"{name} has another shape or is quantized"
            if writes != writes_now or not (values is None or now is None or _same(values, now)):
                return f"{name} has other values"
        return None


def _form(tensor: Any) -> tuple[tuple[int, ...], str, int | None]:
    """Shape, kind and count of writes of a tensor."""
    kind = type(tensor).__name__ + str(tensor.is_floating_point())
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tuple(tensor.shape), kind, None if local.is_inference() else local._version


def _sample(tensor: Any) -> Tensor | None:
    """A few values of a tensor; None of one that is elsewhere."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.is_meta or not local.numel() or type(local) not in (Tensor, nn.Parameter):
        return None
    flat = local.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLES)].clone().cpu()


def _same(before: Tensor, now: Tensor) -> bool:
    """Whether values are what they were, converted to the type that they have now."""
    before = before.to(now.dtype)
    return torch.equal(before, now) or torch.equal(torch.nan_to_num(before), torch.nan_to_num(now))


def _place_of(config: DraftHeadConfig) -> dict[str, Any]:
    """Where, in what a config names as its base, the files of it lie on this machine."""
    revision, subfolder = config.base_model_revision or "main", config.base_subfolder or ""
    return {"revision": revision, "subfolder": subfolder, "local_files_only": True}


def _files_of(base: Any, config: DraftHeadConfig) -> list[str] | None:
    """The files of safetensors of the base that a config names, with which one can be compared; None if none are here,
    or they have another form."""
    if getattr(base, "hf_quantizer", None) is not None:
        return None
    with suppress(OSError, ValueError):
        return checkpoint_files(str(config.base_model_name_or_path), None, _place_of(config))
    return None


def _stored_names(file: str) -> list[str]:
    with safe_open(file, framework="pt") as stored:
        return list(stored.keys())


def change_of_base(
    base: Any, config: DraftHeadConfig, as_loaded: Fingerprint | None, given: Mapping[str, Tensor] = NO_OPTIONS
) -> str | None:
    """What of a base is otherwise than in the place that a config names; None if nothing is.

    All values of tensors that have the same name there are compared; of others, what was noted when it was loaded.
    Without such notes it is asked whether it is known to be the same, as it is not where the files are not on this
    machine. Tensors that are `given` stand in the place of its own.
    """
    name, own = str(config.base_model_name_or_path), plain_state(base)
    if as_loaded is not None and (others := sorted(set(own) ^ set(as_loaded.tensors))):
        return f"{others[0]} came or went"
    folder = Path(name, config.base_subfolder or "")
    if folder.is_dir() and not any(file.suffix in WEIGHT_SUFFIXES for file in folder.iterdir()):
        return f"there are no weights in {name!r}"
    with suppress(OSError, ValueError):
        fields, _ = PreTrainedConfig.get_config_dict(name, **_place_of(config))
        if (field := _other_field(base.config, fields)) is not None:
            return f"its config has another {field} than in {name!r}"
    rest = {**own, **given}
    if (files := _files_of(base, config)) is None and as_loaded is None:
        return f"{name!r} is not on this machine"
    for file in files or ():
        with safe_open(file, framework="pt") as stored:
            for key in set(stored.keys()) & set(rest):
                there, now = stored.get_slice(key), rest[key].detach()
                if not now.is_floating_point() or now.is_meta or hasattr(now, "to_local") or not now.dim():
                    continue
                if tuple(there.get_shape()) != tuple(now.shape):
                    return f"{key} has another shape than in {name!r}"
                rows = max(1, COMPARED // max(1, now[:1].numel()))
                parts = [slice(start, start + rows) for start in range(0, len(now), rows)]
                if not all(_same(there[part].to(now.device), now[part]) for part in parts):
                    return f"{key} has other values than in {name!r}"
                del rest[key]
    for key in set(given) & set(rest):
        if key not in own or not torch.equal(given[key], own[key]):
            return f"{key} is another"
    return None if as_loaded is None else as_loaded.change({key: rest[key] for key in set(rest) - set(given)})


def _other_field(ours: PreTrainedConfig, there: dict[str, Any]) -> str | None:
    """A field of a base's config by which it computes otherwise than the fields of the one that is named."""
    there = there if there.get("model_type") == ours.model_type else there.get("text_config") or {}
    if there.get("model_type") != ours.model_type:  # of a part of it
        return None
    fields, others = _computed(ours.to_dict()), _computed(type(ours).from_dict(dict(there)).to_dict())
    return min((name for name in fields | others if fields.get(name) != others.get(name)), default=None)


def _computed(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config, and of those in it, that say what a model computes."""
    kept = {name: value for name, value in fields.items() if name not in NOT_COMPUTED}
    return {name: _computed(value) if isinstance(value, dict) else value for name, value in kept.items()}


@contextmanager
def replacing(folder: Path, is_main_process: bool = True) -> Iterator[Path]:
    """A new folder inside `folder`, whose files take their places there when all are written; config.json comes last.

    All that was there is put back if one of them cannot. A folder in it (the base) takes the place of the former one as
    a whole. Then weights go that an earlier save left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as name:
        new = Path(name)
        yield new
        if not is_main_process:
            return
        written = sorted(new.iterdir(), key=lambda place: (place.name == CONFIG_NAME, not place.is_dir()))
        replaced: list[tuple[Path, Path]] = []
        try:
            for place in written:
                target, former = folder / place.name, new / f"former-{place.name}"
                if place.is_dir() and target.is_dir():
                    target.rename(former)
                elif target.exists():
                    _keep(target, former)
                replaced.append((target, former))
                os.replace(place, target)
        except BaseException:
            for target, former in reversed(replaced):
                if (new / target.name).exists() and target.exists():  # not replaced yet
                    continue
                if target.exists():
                    os.replace(target, new / target.name)
                if former.exists():
                    os.replace(former, target)
            raise
        for target, former in replaced:
            for file in former.iterdir() if former.is_dir() and not former.is_symlink() else ():
                kept = not _of_a_model(file) or (file.is_file() and not (target / CONFIG_NAME).is_file())
                if kept and not (target / file.name).exists():  # of the user's own, or a base where none was written
                    os.replace(file, target / file.name)
        _remove_earlier(folder, {place.name for place in written})


def _keep(file: Path, former: Path) -> None:
    """Let a file, whose name another one will take, be found under a second name."""
    try:
        os.link(file, former)
    except OSError:  # a file system without links
        shutil.copy2(file, former)


def _remove_earlier(folder: Path, written: set[str]) -> None:
    """Remove weights of heads that would be read in the place of those that were written, or with them.

    These are a whole file, shards and index of the same variant; and an adapter of heads and base as one, which an
    earlier release wrote.
    """
    variants = {_variant(name) for name in written} - {None}
    for file in folder.glob("model*.safetensors*"):
        if _variant(file.name) in variants and file.name not in written:
            file.unlink()
    with suppress(OSError):  # a damaged one, which loading refuses
        if (folder / ADAPTER_WEIGHTS).is_file() and is_of_a_whole_model(folder):
            (folder / ADAPTER_WEIGHTS).unlink()
            (folder / ADAPTER_CONFIG_NAME).unlink(missing_ok=True)


def _variant(name: str) -> str | None:
    """The variant of a file of weights or of an index of them, an empty text without one; None for other files."""
    found = re.fullmatch(r"model(\..+?)?(-\d{5}-of-\d{5})?\.safetensors(\.index(\..+)?\.json)?", name)
    return None if found is None else found[1] or found[4] or ""


def _of_a_model(file: Path) -> bool:
    """Whether a file or folder is one that saving a base writes."""
    weights = file.name.startswith(("model", "pytorch_model")) and ".safetensors" in file.name
    return weights or file.name in (CONFIG_NAME, "generation_config.json") or (file / ADAPTER_CONFIG_NAME).is_file()
