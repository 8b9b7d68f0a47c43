"""The base of a set of heads: where it lies, whether it is the right one and still what it was, and loading it."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
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

from hf_drafthead.modeling.adapters import (
    ADAPTER_WEIGHTS,
    adapters_of,
    find_adapter,
    is_of_a_whole_model,
    load_adapter,
    plain,
    unwrapped,
)
from hf_drafthead.modeling.checkpoint import HTTP_ERROR, checkpoint_files, fetch_file, is_local, is_missing_folder
from hf_drafthead.modeling.config import BASE_FOLDER, MODEL_TYPE_PREFIX, DraftHeadConfig, sub_config
from hf_drafthead.modeling.files import read_json, refusing
from hf_drafthead.modeling.gguf_files import gguf_arguments, load_tokenizer, split_gguf

logger = logging.get_logger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tekken.json")
GIVE_BASE = "pass base_model= (in a shell --base-model) with its id, path or object."
# For decoder-only models; transformers lists some of those that hear beside models with an encoder and a decoder.
SEE_OR_HEAR = (AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM)
OF_CONFIG = ("gguf_file", "trust_remote_code", "code_revision")  # arguments by which a config is found
WEIGHTS_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
SAMPLES = 16  # values of a tensor by which it is known again
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".gguf"}
# fields of a config by which a model computes nothing else
NOT_COMPUTED = {"dtype", "torch_dtype", "architectures", "transformers_version", "_name_or_path", "use_cache"}
NOT_COMPUTED |= {"auto_map", "quantization_config", "output_hidden_states", "output_attentions", "return_dict"}
NOT_COMPUTED |= {"tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id"}
NOT_COMPUTED |= {"problem_type"}


def load_base(
    base: str | os.PathLike | nn.Module,
    hub: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    checkpoint: str | None = None,
    config: DraftHeadConfig | None = None,
) -> tuple[Any, dict[str, Any]]:
    """A base for fresh heads, or the one that the heads of a checkpoint (with its config) run on, loaded or as it is
    given; and its origin, as a config says it."""
    hub = {key: value for key, value in hub.items() if value is not None}
    if isinstance(base, nn.Module):
        live = unwrapped(base)
        refuse_unfit(live.config, type(live).__name__, loaded=True)
        refuse_loading_arguments(live, arguments)
        name = full_name(getattr(live.config, "_name_or_path", "")) or None
        if config is not None:
            check_base(config, live.config, name or type(live).__name__)
        return live, {"base_model_name_or_path": name, "base_model_revision": hub.get("revision")}
    hub.setdefault("revision", "main")
    place, file = split_gguf(os.fspath(base))
    if os.path.isdir(place) and (inside := hub.pop("subfolder", None)):
        place = os.path.join(place, inside)  # transformers reads generation_config.json outside of a subfolder there
    called, wanted = f"the base {place!r}", "give the id or path of a causal language model."
    if checkpoint is not None:
        called, wanted = f"{called} of {checkpoint!r}", GIVE_BASE
    if is_missing_folder(place):
        raise OSError(f"{called} was not found (there is no such folder): {wanted}")
    arguments = gguf_arguments({**arguments, "gguf_file": file} if file else arguments)
    file = arguments.get("gguf_file")
    called += f" (its file {file!r})" if file else ""
    of = Exception if file else (OSError, ValueError, HTTP_ERROR, SafetensorError)  # readers of GGUF raise anything
    reading = partial(refusing, OSError, f"{called} cannot be read", wanted, of)
    with reading():
        adapter = find_adapter(place, hub)
        if adapter is not None and fetch_file(place, CONFIG_NAME, hub) is None:
            place, hub = _base_of_adapter(adapter, hub)
        else:
            adapter = None  # a folder that holds both: transformers loads the two
        of_config = {key: arguments[key] for key in OF_CONFIG if arguments.get(key) is not None}
        base_config: Any = AutoConfig.from_pretrained(place, **of_config, **hub)
    refuse_unfit(base_config, place, loaded=False)
    commit = commit_of(place, hub, file or CONFIG_NAME)
    if config is not None:
        check_base(config, base_config, place)
    hub = {**hub, "revision": commit or hub.get("revision")}
    same = not any(hasattr(base_config, name) for name in set(arguments) - {"dtype", "torch_dtype"})
    with reading():
        kind = auto_class(base_config) or AutoModelForCausalLM
        loaded = kind.from_pretrained(place, config=base_config if same else None, **hub, **arguments)
    if file is not None:
        loaded.name_or_path = loaded.config.name_or_path = place  # transformers takes the title that is in the file
    if adapter is not None:
        load_adapter(loaded, adapter)
    origin = {"base_model_name_or_path": full_name(place), "base_model_revision": commit, "base_gguf_file": file}
    return loaded, {**origin, "base_subfolder": hub.get("subfolder") or None}


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
    return str(inside.resolve()) if inside.is_dir() or name.startswith((".", os.sep)) else name


def name_base(config: DraftHeadConfig, checkpoint: str | os.PathLike, origin: Mapping[str, Any]) -> None:
    """Let a config name a base; the one of the Hub that it named before, if that is another, is where it comes from."""
    former = config.base_model_name_or_path
    if former and former != origin["base_model_name_or_path"] and not config.base_included:
        config.base_origin = config.base_origin if is_local(former, checkpoint) else former
    nothing = dict.fromkeys(("base_model_revision", "base_gguf_file", "base_subfolder"))
    config.update({**nothing, **origin})


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
    with refusing(OSError, f"config.json of the base {name!r} cannot be fetched", of=(OSError, HTTP_ERROR)):
        fields, _ = PreTrainedConfig.get_config_dict(name, revision=revision or "main", token=token, **hub)
    return sub_config(f"the config of {name!r}", fields)


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


def quantizer_of(base: Any) -> Any:
    """What a base is quantized by; None of one with ordinary weights, as of an unpacked GGUF file."""
    quantizer = getattr(base, "hf_quantizer", None)
    return None if getattr(getattr(quantizer, "quantization_config", None), "dequantize", False) else quantizer


def full_name(name: str) -> str:
    """The name of a base, wherever it will be read: a path is made absolute."""
    return str(Path(name).resolve()) if os.path.isdir(name) else name


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
    if gguf_file is None and not any(fetch_file(name, file, hub) for file in TOKENIZER_FILES):
        return False
    with refusing(ValueError, f"the tokenizer of {name!r} cannot be loaded", "copy one into the folder."):
        load_tokenizer(name, gguf_file, **hub).save_pretrained(folder)
    return True


class AsLoaded(NamedTuple):
    """What a base was: the files of the named one, and by name a print of every tensor."""

    files: list[str]
    prints: dict[str, Any]


def fingerprint(base: Any, config: DraftHeadConfig) -> AsLoaded:
    """What a base is, by which it will be found out whether it is still that."""
    prints = {name: _print(tensor) for name, tensor in tensors_of(base).items()}
    return AsLoaded(_files_of(base, config), prints)


def _place_of(config: DraftHeadConfig) -> dict[str, Any]:
    """Where, in what a config names as its base, the files of it lie on this machine."""
    revision, subfolder = config.base_model_revision or "main", config.base_subfolder or ""
    return {"revision": revision, "subfolder": subfolder, "local_files_only": True}


def _files_of(base: Any, config: DraftHeadConfig) -> list[str]:
    """The safetensors files, here, of the base that a config names; none if this one has another form."""
    with suppress(OSError, ValueError):
        if quantizer_of(base) is None and config.base_gguf_file is None:
            return checkpoint_files(str(config.base_model_name_or_path), _place_of(config))
    return []


def tensors_of(base: Any) -> dict[str, Tensor]:
    """The tensors of a base without its adapters, each by its first name; torch.ao's layers list more."""
    named = plain(base).state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(named.items())}
    own = {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor) and first[id(tensor)] == name}
    return {name: tensor.detach() for name, tensor in own.items()}


def _print(tensor: Any) -> tuple[Any, Any]:
    """The form of a tensor with the count of its writes; and a few of its values, None where they cannot be read."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    writes = None if local.is_inference() else local._version
    form = tuple(tensor.shape), type(tensor), tensor.is_floating_point(), writes
    if local.is_meta or not local.numel() or type(local) not in (Tensor, nn.Parameter):
        return form, None
    flat = local.detach().reshape(-1)
    return form, flat[:: max(1, flat.numel() // SAMPLES)].clone().cpu()


def _same(before: Tensor, now: Tensor) -> bool:
    """Whether values are what they were, converted to the type that they have now."""
    before = before.to(now)
    same_shape = before.shape == now.shape
    return torch.equal(before, now) or (same_shape and torch.allclose(before, now, rtol=0, atol=0, equal_nan=True))


def change_of_base(
    base: Any, config: DraftHeadConfig, as_loaded: AsLoaded | None, given: Mapping[str, Tensor], folder: Path
) -> str | None:
    """Why a base is not the one that a config names; None if it is. Adapters do not count: they are always saved.

    All values of tensors that have the same name in files of it are compared; of others, what was noted when it was
    loaded. Tensors that are `given` stand in the place of its own; heads are about to be saved in a folder.
    """
    name, adapters = config.base_model_name_or_path, adapters_of(base)
    if config.base_included:
        return "it came with the heads"
    if not name:
        return "it has no name"
    if is_missing_folder(name) or as_loaded is None:
        return f"there is no {name!r}"
    if os.path.realpath(name) in map(os.path.realpath, (folder, folder / BASE_FOLDER)):
        return "its files are where the model is saved"
    for parameter, tensor in base.named_parameters():
        if tensor.requires_grad and not any(f".{adapter}." in f"{parameter}." for adapter in adapters):
            return f"{parameter} is being trained"
    if (quantizer := quantizer_of(base)) is not None and not quantizer.pre_quantized:
        return "it was quantized when it was loaded"
    if os.path.isdir(name) and not any(file.suffix in WEIGHT_SUFFIXES for file in Path(name).iterdir()):
        return f"there are no weights in {name!r}"
    with suppress(OSError, ValueError):
        fields, _ = PreTrainedConfig.get_config_dict(name, **_place_of(config))
        if (field := _other_field(base.config, fields)) is not None:
            return f"its config has another {field} than in {name!r}"
    rest = {key: given.get(key, tensor).detach() for key, tensor in tensors_of(base).items()}
    if others := sorted(set(rest) ^ set(as_loaded.prints)):
        return f"{others[0]} came or went"
    for file in filter(os.path.isfile, _files_of(base, config) or as_loaded.files):
        with safe_open(file, framework="pt") as stored:
            for key in filter(lambda key: key in rest and _is_compared(rest[key]), stored.keys()):
                if not _same(stored.get_tensor(key), rest.pop(key)):
                    return f"{key} has another shape or other values than in {name!r}"
    for key, tensor in rest.items():
        (before, values), (form, now) = as_loaded.prints[key], _print(tensor)
        if form != before or not (values is None or now is None or _same(values, now)):
            return f"{key} has another shape, form or other values"
    return None


def _is_compared(tensor: Any) -> bool:
    """Whether a tensor is compared with that of its name in a file: an ordinary one of numbers."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.is_floating_point() and tensor.dim() and not tensor.is_meta


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
    """A new folder inside `folder`, whose files take their places there when all are written, config.json last; all
    that was there is put back if one of them cannot. Then weights go that an earlier save left."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{str(folder)!r} is a file: give a folder to save in.")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as name, ExitStack() as undo:
        new = Path(name, "new")
        new.mkdir()
        yield new
        if not is_main_process:
            return
        files = [place.relative_to(new) for place in new.rglob("*") if place.is_file()]
        files.sort(key=lambda file: (file == Path(CONFIG_NAME), file))
        for number, file in enumerate(files):
            target, former = folder / file, Path(name, str(number))
            for inner in reversed([folder / part for part in file.parents][:-1]):
                if inner.is_symlink():  # what it leads to stays as it is
                    undo.callback(inner.rename(former.with_suffix(".link")).rename, inner)
                if not inner.exists():
                    inner.mkdir()
                    undo.callback(inner.rmdir)
            if target.exists():
                with suppress(OSError):  # a file system without links
                    os.link(target, former)
                if not former.exists():
                    shutil.copy2(target, former)
                undo.callback(os.replace, former, target)
            else:
                undo.callback(target.unlink, missing_ok=True)
            os.replace(new / file, target)
        undo.pop_all()
        for place in {file.parent for file in files if WEIGHTS_FILE.fullmatch(file.name)}:
            _remove_earlier(folder / place, {file.name for file in files if file.parent == place})
        for adapter in folder.glob(f"*/*/{ADAPTER_CONFIG_NAME}"):  # which the base of before had
            if adapter.relative_to(folder) not in files and any(file.parts[0] == adapter.parts[-3] for file in files):
                shutil.rmtree(adapter.parent)


def _remove_earlier(folder: Path, written: set[str]) -> None:
    """Remove weights that would be read in the place of those that were written: a whole file, shards and index; and an
    adapter of heads and base as one, which an earlier release wrote."""
    for file in folder.iterdir():
        if WEIGHTS_FILE.fullmatch(file.name) and file.name not in written:
            file.unlink()
    with suppress(OSError):  # there is none, or a damaged one, which loading refuses
        if is_of_a_whole_model(folder):
            (folder / ADAPTER_WEIGHTS).unlink()
            (folder / ADAPTER_CONFIG_NAME).unlink(missing_ok=True)
