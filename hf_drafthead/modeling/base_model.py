"""The base of a set of heads: where it lies, whether it is the right one and still what it was, and loading it."""

import difflib
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open
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
    NOT_ASKED,
    WEIGHTS,
    checkpoint_files,
    fetch_file,
    is_missing_folder,
    was_looked_up,
    why_refused,
)
from hf_drafthead.modeling.config import MODEL_TYPE_PREFIX, DraftHeadConfig
from hf_drafthead.modeling.files import first_line, read_json
from hf_drafthead.modeling.gguf_files import beside, gguf_arguments, load_tokenizer, reading_gguf, split_gguf

logger = logging.get_logger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tekken.json")
GIVE_BASE = "pass base_model= (in a shell --base-model) with its id, path or object."
# For decoder-only models; transformers lists some of those that hear beside models with an encoder and a decoder.
SEE_OR_HEAR = (AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM)
BESIDE_THE_CONFIG = ("dtype", "torch_dtype", "quantization_config", "trust_remote_code", "code_revision")
HARMLESS = {"attn_implementation", "experts_implementation", "gguf_file", "dtype", "subfolder"}
SAMPLES = 16  # values of a tensor by which it is known again
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack"}
COMPARED = 1 << 24  # values that are compared with a file at a time
# fields of a config by which a model computes nothing else
NOT_COMPUTED = {
    "dtype",
    "torch_dtype",
    "architectures",
    "transformers_version",
    "_name_or_path",
    "use_cache",
    "auto_map",
}
NOT_COMPUTED |= {
    "quantization_config",
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "tie_word_embeddings",
}
NOT_COMPUTED |= {"bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type"}


def load_named(
    name: str,
    hub: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    fields: Collection[str] = (),
    checkpoint: str | None = None,
    config: DraftHeadConfig | None = None,
) -> tuple[Any, dict[str, Any]]:
    """A base for fresh heads, or the one that the heads of a checkpoint run on; and what their config says of it.

    Args:
        name: Hub id or path, of a base or of an adapter for one; it may end with the name of a GGUF file.
        hub: keyword arguments of every download, `revision` and `subfolder` among them.
        arguments: all others of `AutoModelForCausalLM.from_pretrained`.
        fields: of the config of fresh heads.
        checkpoint, config: of trained heads.

    Raises:
        OSError: there is no such base.
        TypeError: an argument is a field of the heads, misspelt.
        ValueError: it is no decoder-only language model, or another than the heads were made for.
    """
    name, file = split_gguf(name)
    called, wanted = f"the base {name!r}", "give the id or path of a causal language model."
    if checkpoint is not None:
        called, wanted = f"{called} of {checkpoint!r}", GIVE_BASE
    if is_missing_folder(name):
        raise OSError(f"{called} was not found (there is no such folder): {wanted}")
    hub = {key: value for key, value in hub.items() if value is not None}
    arguments = gguf_arguments(name, {**arguments, "gguf_file": file} if file else arguments, hub)
    file, place, adapter = arguments.get("gguf_file"), name, None
    try:
        # What the Hub has against it is told where the config is fetched.
        quiet = {f"_raise_exceptions_for_{reason}": False for reason in ("connection_errors", "gated_repo")}
        adapter = find_adapter(name, {**hub, **quiet})
        if adapter is not None and fetch_file(name, CONFIG_NAME, hub) is None:
            place, hub = _base_of_adapter(adapter, hub)
        else:
            adapter = None  # a folder that holds both: transformers loads the two
        base_config, arguments, altered = _config_at(place, hub, arguments)
    except (OSError, ValueError) as error:  # ValueError: a folder that holds no model
        if refused := why_refused(error):
            other = "" if checkpoint is None else "; base_model= takes another place of it"
            raise OSError(f"{called} cannot be fetched at {hub.get('revision')!r}: {refused}{other}.") from error
        what = "cannot be read" if os.path.isdir(name) else "was not found"
        raise OSError(f"{called} {what} ({first_line(error)}{'' if file else beside(name)}): {wanted}") from error
    refuse_unfit(base_config, place, loaded=False)
    refuse_misspelt(arguments, fields)
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
    except (OSError, HTTP_ERROR) as error:
        refused = why_refused(error)
        if refused is None and was_looked_up(place, file or WEIGHTS, hub):
            raise
        raise OSError(f"{called} cannot be fetched at {hub['revision']!r}: {refused or NOT_ASKED}.") from error
    if file is not None:
        base.name_or_path = base.config.name_or_path = place  # transformers takes the title that is in the file
    if adapter is not None:
        load_adapter(base, adapter)
    base.__dict__["_altered"] = altered
    origin = {"base_model_name_or_path": full_name(place), "base_model_revision": commit, "base_gguf_file": file}
    return base, {**origin, "base_subfolder": hub.get("subfolder") or None}


def _base_of_adapter(folder: str, hub: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Where the base of an adapter lies, and how it is fetched; a ValueError if the adapter does not say it."""
    config = read_json(Path(folder) / ADAPTER_CONFIG_NAME)
    if not (name := config.get("base_model_name_or_path")):
        raise ValueError(f"the adapter in {folder!r} does not say which base it is for: load the two yourself")
    fetch = {key: value for key, value in hub.items() if key != "subfolder"}
    return str(name), {**fetch, "revision": config.get("revision") or "main"}


def _config_at(
    name: str, hub: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[PreTrainedConfig, dict[str, Any], str | None]:
    """The base's config, read before its weights are; arguments to load these with, the config among them; and a field
    of it that was given, by which the base is another than the named one."""
    # As AutoModel does: these are not for the config, everything else that it knows goes into it.
    loading = {key: arguments[key] for key in BESIDE_THE_CONFIG if arguments.get(key) is not None}
    fields = {key: value for key, value in arguments.items() if key not in loading}
    code = {key: loading[key] for key in ("trust_remote_code", "code_revision") if key in loading}
    with reading_gguf(arguments.get("gguf_file")):
        config, left = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **code, **hub, **fields)
    altered = sorted(set(fields) - set(left) - HARMLESS)
    return config, {**loading, **left, "config": config}, f"{altered[0]} was given" if altered else None


def locate_base(config: DraftHeadConfig, checkpoint: str) -> str:
    """Name of the base that the config asks for: a Hub id, or a path, made absolute from the checkpoint's folder.

    Raises:
        OSError: the config names no base, or a folder that is not there.
    """
    name = config.base_model_name_or_path
    if not name:
        raise OSError(f"{checkpoint!r} does not say which base it was trained for: {GIVE_BASE}")
    inside = Path(checkpoint) / name
    if inside.is_dir():
        return str(inside.resolve())
    if os.path.isabs(name) or name.startswith("."):
        if os.path.isabs(name) and Path(name).is_dir():
            return name
        raise OSError(f"the base of {checkpoint!r} was not found at {str(inside)!r}: {GIVE_BASE}")
    return name


def check_base(config: DraftHeadConfig, base_config: PreTrainedConfig, name: str) -> None:
    """Refuse a base of another model type, hidden size or vocabulary than the heads were made for."""
    wanted, base_text = config.get_text_config(), base_config.get_text_config()
    trained_for = config.base_model_name_or_path or "another base"
    for field, words in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary"), ("model_type", "model type")):
        want, have = getattr(wanted, field, None), getattr(base_text, field, None)
        if want is not None and want != have:
            if name == trained_for:
                raise ValueError(
                    f"the base {name!r} has changed since these heads were trained for it ({words} {want} then, {have} "
                    "now): give the commit that they were trained on (base_revision=), or train heads for the new one."
                )
            raise ValueError(
                f"these heads were trained for {trained_for!r} ({words} {want}); the base at {name!r} has {words} "
                f"{have}: load the first, or train heads for the second."
            )


def fetch_config(name: str, revision: str | None, token: str | bool | None, **hub: Any) -> PreTrainedConfig:
    """The config of a base at a Hub id or folder, without running code that may lie beside it.

    Raises:
        OSError: there is none, or it cannot be fetched.
    """
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name, revision=revision or "main", token=token, **hub)
    except (OSError, HTTP_ERROR) as error:
        refused = why_refused(error) or first_line(error)
        raise OSError(f"config.json of the base {name!r} cannot be fetched: {refused}.") from error
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
    """Refuse a base whose own `generate` draft heads could not reproduce: with heads, an encoder, or no language model.

    Args:
        config: of the base.
        name: for the message.
        loaded: whether the base is a loaded model, and not yet to be loaded by AutoModelForCausalLM.
    """
    if str(config.model_type).startswith(MODEL_TYPE_PREFIX):
        base_name = "model.base" if loaded else getattr(config, "base_model_name_or_path", None)
        if base_name and os.path.isdir(inside := os.path.join(name, base_name)):  # written relative to the heads
            base_name = os.path.normpath(inside)
        raise ValueError(f"{name!r} has draft heads already: give their base{f' ({base_name})' if base_name else ''}.")
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


def refuse_misspelt(arguments: Mapping[str, Any], fields: Collection[str]) -> None:
    """Refuse arguments for loading a base that are more likely fields of the heads, by a TypeError that names them."""
    for name in arguments:
        if meant := difflib.get_close_matches(name, fields, 1, 0.7):
            raise TypeError(f"{name}= is no field of these heads and no argument of a base: {meant[0]}= may be meant.")


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
    """Save the tokenizer of a base in a folder that has none; returns whether the folder has one.

    Args:
        name: folder or Hub id of the base; None if there is none to take it from.
        gguf_file: of the base, if it is in one.
        hub: keyword arguments of every download.

    Raises:
        OSError: the Hub refuses access.
        ValueError: it cannot be loaded.
    """
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
        raise ValueError(f"the tokenizer of {name!r} cannot be loaded: {first_line(error)}") from error
    return True


class Fingerprint:
    """A few values of every tensor of a base, by which it is seen whether it is still what it was.

    Tensors that an optimizer has written to are known by the count of writes that torch keeps; other changes by values.
    """

    def __init__(self, base: nn.Module) -> None:
        self.tensors = {name: _sample(tensor) for name, tensor in plain_state(base).items()}

    def change(self, base: nn.Module) -> str | None:
        """What is not as it was; None if all is."""
        state = plain_state(base)
        if set(state) != set(self.tensors):
            return f"{sorted(set(state) ^ set(self.tensors))[0]} came or went"
        for name, tensor in state.items():
            (shape, kind, writes, values), now = self.tensors[name], _sample(tensor)
            if (shape, kind) != now[:2]:
                return f"{name} has another shape or is quantized"
            if writes != now[2] or (values is not None and now[3] is not None and not _same(values, now[3])):
                return f"{name} has other values"
        return None


def _sample(tensor: Any) -> tuple[tuple[int, ...], str, int | None, Tensor | None]:
    """Shape, kind, count of writes, and a few values of a tensor, None of one that is elsewhere."""
    shape, kind = tuple(tensor.shape), type(tensor).__name__ + str(tensor.is_floating_point())
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    writes = None if local.is_inference() else local._version
    if local.is_meta or not local.numel() or type(local) not in (Tensor, nn.Parameter):
        return shape, kind, writes, None
    flat = local.detach().view(-1) if local.is_contiguous() else local.detach().reshape(-1)
    return shape, kind, writes, flat[:: max(1, flat.numel() // SAMPLES)].clone().cpu()


def _same(before: Tensor, now: Tensor) -> bool:
    """Whether values are what they were, converted to the type that they have now."""
    before = before.to(now.dtype)
    return torch.equal(before, now) or torch.equal(torch.nan_to_num(before), torch.nan_to_num(now))


def change_of_files(
    base: Any, config: DraftHeadConfig, given: Mapping[str, Tensor] = NO_OPTIONS, live: bool = False
) -> str | None:
    """What of a base is otherwise in the files of the place that it is named by; an empty text if nothing is, None if
    none are on this machine.

    All values of tensors that have the same name there are compared.

    Args:
        given: tensors in the place of the base's own.
        live: the base was given as a loaded model: its config is compared as well.
    """
    name = str(config.base_model_name_or_path)
    revision = config.base_model_revision or "main"
    hub: dict[str, Any] = {"revision": revision, "subfolder": config.base_subfolder or "", "local_files_only": True}
    state = {**(own := plain_state(base)), **given}
    try:
        if live and (field := _other_field(base.config, fetch_config(name, token=None, **hub))):
            return f"its config has another {field} than in {name!r}"
        files = checkpoint_files(name, None, hub)
    except (OSError, ValueError):  # in another form, or not on this machine
        changed = [key for key in given if key in own and not torch.equal(given[key], own[key])]
        if live and _has_no_weights(Path(name, config.base_subfolder or "")):
            return f"there is no {name!r}"
        return f"{changed[0]} is another" if changed else None
    for file in files if getattr(base, "hf_quantizer", None) is None else ():
        with safe_open(file, framework="pt") as stored:
            for key in set(stored.keys()) & set(state):
                there, now = stored.get_slice(key), state[key].detach()
                if not now.is_floating_point() or now.is_meta or hasattr(now, "to_local") or not now.dim():
                    continue
                if tuple(there.get_shape()) != tuple(now.shape):
                    return f"{key} has another shape than in {name!r}"
                rows = max(1, COMPARED // max(1, now[:1].numel()))
                parts = [slice(start, start + rows) for start in range(0, len(now), rows)]
                if not all(_same(there[part].to(now.device), now[part]) for part in parts):
                    return f"{key} has other values than in {name!r}"
    return ""


def _other_field(ours: PreTrainedConfig, named: PreTrainedConfig) -> str | None:
    """A field of a base's config by which it computes otherwise than the base that is named."""
    named = named if named.model_type == ours.model_type else named.get_text_config()
    if named.model_type != ours.model_type:  # of a part of it, or of code of its own
        return None
    fields, others = _computed(ours.to_dict()), _computed(named.to_dict())
    return min((name for name in fields | others if fields.get(name) != others.get(name)), default=None)


def _computed(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config, and of those in it, that say what a model computes."""
    kept = {name: value for name, value in fields.items() if name not in NOT_COMPUTED}
    return {name: _computed(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _has_no_weights(folder: Path) -> bool:
    """Whether this is a folder of a config alone."""
    return folder.is_dir() and not any(file.suffix in WEIGHT_SUFFIXES for file in folder.iterdir())


@contextmanager
def replacing(folder: Path, is_main_process: bool = True) -> Iterator[Path]:
    """A new folder inside `folder`, whose files take their places there when all are written; config.json comes last.

    A folder in it (the base) takes the place of the former one as a whole. Then weights go that an earlier save left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as name:
        new = Path(name)
        yield new
        if not is_main_process:
            return
        written = sorted(new.iterdir(), key=lambda place: (place.name == CONFIG_NAME, not place.is_dir()))
        for place in written:
            target = folder / place.name
            if not (place.is_dir() and target.is_dir()):
                os.replace(place, target)
                continue
            former = target.rename(new / f"former-{place.name}")
            try:
                place.rename(target)
            except BaseException:
                former.rename(target)
                raise
            for file in former.iterdir():
                kept = not _of_a_model(file) or (file.is_file() and not (target / CONFIG_NAME).is_file())
                if kept and not (target / file.name).exists():  # of the user's own, or a base where none was written
                    os.replace(file, target / file.name)
        _remove_earlier(folder, {place.name for place in written})


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
