"""The base of a set of heads: where it lies, whether it is the right one and still what it was, and loading it."""

import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, cached_file, extract_commit_hash, logging
from transformers.utils import quantization_config as quantizations

from hf_drafthead.modeling import files
from hf_drafthead.modeling.adapters import find_adapter, load_adapter, plain, unwrapped
from hf_drafthead.modeling.config import BASE_FOLDER, MODEL_TYPE_PREFIX, DraftHeadConfig, sub_config
from hf_drafthead.modeling.files import full_name, is_missing_folder, refusing

logger = logging.get_logger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tekken.json")
GIVE_BASE = "pass base_model= (in a shell --base-model) with its id, path or object."
# For decoder-only models; transformers lists some of those that hear beside models with an encoder and a decoder.
KINDS = (AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM)
HUB_ARGUMENTS = {"cache_dir", "force_download", "local_files_only", "proxies", "token"}  # of every download
PLACE_ARGUMENTS = HUB_ARGUMENTS | {"revision", "subfolder"}
OF_AUTO_CLASSES = {"trust_remote_code", "_from_auto", "_from_pipeline"}  # arguments that change no base
OF_CONFIG = ("gguf_file", "trust_remote_code", "code_revision")  # arguments by which a config is found
# What is read as the weights of heads, with an adapter of the whole model, and of a base beside them.
WEIGHT_FILES = re.compile(
    r"(base/)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|adapter_(config\.json|model\.safetensors)"
)
ASIDE = ".former-adapter"  # folder in which an adapter is kept that lay where heads are saved; no push sends it
SAMPLES = 16  # values of a tensor by which it is known again
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".gguf"}
# fields of a config by which a model computes nothing else
NOT_COMPUTED = {*PreTrainedConfig().to_dict(), "_name_or_path", "auto_map", "quantization_config", "torch_dtype"}
NOT_COMPUTED |= {"tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"}


def load_base(
    base: str | os.PathLike | nn.Module, arguments: Mapping[str, Any], heads: DraftHeadConfig | None = None
) -> tuple[Any, dict[str, Any]]:
    """A base for fresh heads, or the one that the heads of a checkpoint run on, loaded or as it is given; and its
    origin, as a config says it."""
    arguments = {name: value for name, value in arguments.items() if value is not None or name not in PLACE_ARGUMENTS}
    hub = {name: arguments.pop(name) for name in PLACE_ARGUMENTS & set(arguments)}
    if isinstance(base, nn.Module):
        live = unwrapped(base)
        refuse_loading_arguments(live, arguments)
        name = full_name(getattr(live.config, "_name_or_path", "")) or None
        refuse_unfit(live.config, type(live).__name__, heads, loaded=True)
        return live, {"base_model_name_or_path": name, "base_model_revision": hub.get("revision")}
    hub.setdefault("revision", "main")
    place, file = split_gguf(os.fspath(base))
    if os.path.isdir(place) and (inside := hub.pop("subfolder", None)):
        place = os.path.join(place, inside)  # transformers reads generation_config.json outside of a subfolder there
    called, wanted = f"the base {place!r}", "give the id or path of a causal language model."
    if heads is not None:
        called, wanted = f"{called} of {heads.name_or_path!r}", GIVE_BASE
    if is_missing_folder(place):
        raise OSError(f"{called} was not found (there is no such folder): {wanted}")
    arguments = gguf_arguments({**arguments, "gguf_file": file} if file else arguments)
    file = arguments.get("gguf_file")
    called += f" (its file {file!r})" if file else ""
    of = Exception if file else (OSError, ValueError, files.HTTP_ERROR, SafetensorError)  # GGUF readers raise anything
    reading = partial(refusing, OSError, f"{called} cannot be read", wanted, of)
    with reading():
        adapter = find_adapter(place, hub)
        if adapter is not None and files.fetch_file(place, CONFIG_NAME, hub) is None:
            config = files.read_json(Path(adapter) / ADAPTER_CONFIG_NAME)
            if not (place := str(config.get("base_model_name_or_path") or "")):
                raise ValueError(f"the adapter in {adapter!r} does not say which base it is for: load the two yourself")
            hub = {**hub, "revision": config.get("revision") or "main"}
            hub.pop("subfolder", None)
        else:
            adapter = None  # a folder that holds both: transformers loads the two
        of_config = {key: arguments[key] for key in OF_CONFIG if arguments.get(key) is not None}
        base_config: Any = AutoConfig.from_pretrained(place, **of_config, **hub)
    refuse_unfit(base_config, place, heads)
    commit = commit_of(place, hub, file or CONFIG_NAME)
    hub["revision"] = commit or hub.get("revision")
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


def name_base(config: DraftHeadConfig, checkpoint: str | os.PathLike, origin: Mapping[str, Any]) -> None:
    """Let a config name a base; the one of the Hub that it named before, if that is another, is where it comes from."""
    former = config.base_model_name_or_path
    if former and former != origin["base_model_name_or_path"] and not config.base_included:
        config.base_origin = config.base_origin if files.is_local(former, checkpoint) else former
    nothing = dict.fromkeys(("base_model_revision", "base_gguf_file", "base_subfolder"))
    config.update({**nothing, **origin})


def refuse_unfit(
    config: PreTrainedConfig, name: str, heads: DraftHeadConfig | None = None, loaded: bool = False
) -> None:
    """Refuse a base whose own `generate` draft heads could not reproduce: with heads, an encoder, or no text; and one
    of another model type, hidden size or vocabulary than the heads were made for."""
    if str(config.model_type).startswith(MODEL_TYPE_PREFIX):
        raise ValueError(f"{name!r} has draft heads already: give their base alone.")
    remote = bool(getattr(config, "auto_map", None)) or config.model_type not in CONFIG_MAPPING
    if config.is_encoder_decoder if loaded else not (remote or auto_class(config)):
        kind = "an encoder-decoder" if config.is_encoder_decoder else "no language"
        advice = "a decoder-only language model, as AutoModelForCausalLM or AutoModelForMultimodalLM loads it"
        raise ValueError(f"{name!r} is {kind} model ({config.model_type}): draft heads need {advice}.")
    text = config.get_text_config()
    for field, words in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary"), ("model_type", "model type")):
        want, have = getattr(heads and heads.get_text_config(), field, None), getattr(text, field, None)
        if heads is not None and want not in (None, have):
            what = f"these heads were trained for {heads.base_model_name_or_path or 'another base'!r} ({words} {want})"
            advice = "load the first (base_revision= is its commit), or train heads for the second"
            raise ValueError(f"{what}; the base at {name!r} has {words} {have}: {advice}.")


def fetch_config(name: str, revision: str | None, token: str | bool | None, **hub: Any) -> PreTrainedConfig:
    """The config of a base at a Hub id or folder, without running code that may lie beside it."""
    with refusing(OSError, f"config.json of the base {name!r} cannot be fetched", of=(OSError, files.HTTP_ERROR)):
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


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that loads a base, which may also see or hear; None for what continues no text."""
    kinds: Any = KINDS[:1] if config.is_encoder_decoder else KINDS
    return next((kind for kind in kinds if type(config) in kind._model_mapping), None)


def refuse_loading_arguments(base: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse what only matters while a base is loaded, and would be ignored with a loaded one, by a TypeError."""
    for name, value in arguments.items():
        now = base.dtype if name.endswith("dtype") else getattr(base.config, f"_{name}", None)
        as_it_is = ("auto", now, str(now).removeprefix("torch.")) if name.endswith("dtype") else (now,)
        if value is not None and value not in as_it_is and name not in OF_AUTO_CLASSES:
            what = f"{name}={value!r} is for loading a base, but the base given is a loaded {type(base).__name__}"
            raise TypeError(f"{what}: set it when the base is loaded.")


def quantizer_of(base: Any) -> Any:
    """What a base is quantized by; None of one with ordinary weights, as of an unpacked GGUF file."""
    quantizer = getattr(base, "hf_quantizer", None)
    return None if getattr(getattr(quantizer, "quantization_config", None), "dequantize", False) else quantizer


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
    if not (gguf_file or any(files.fetch_file(name, file, hub) for file in TOKENIZER_FILES)):
        return False
    with refusing(ValueError, f"the tokenizer of {name!r} cannot be loaded", "copy one into the folder."):
        load_tokenizer(name, gguf_file, **hub).save_pretrained(folder)
    return True


def split_gguf(name: str) -> tuple[str, str | None]:
    """A name of a base as a folder or Hub id, and the GGUF file there, if it names one.

    >>> split_gguf("models/llama.Q4_1.gguf"), split_gguf("org/name")
    (('models', 'llama.Q4_1.gguf'), ('org/name', None))
    """
    if not name.lower().endswith(".gguf") or os.path.isdir(name):
        return name, None
    place, _, file = name.rpartition("/")
    return place or os.curdir, file


def gguf_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained`, by which a GGUF file among them is unpacked: in its blocks, as transformers may
    leave them, weights can be neither saved nor computed in bfloat16 without a conversion in every product."""
    if arguments.get("gguf_file") is None:
        return dict(arguments)
    kind = getattr(quantizations, "GgufConfig", None)  # in older versions weights are always unpacked
    unpacked = {"quantization_config": kind(dequantize=True)} if kind else {}
    return {**unpacked, **{name: value for name, value in arguments.items() if value is not None}}


def reading_gguf(named: str) -> AbstractContextManager[None]:
    """Turn what a damaged or unknown GGUF file makes its readers raise into one line."""
    return refusing(OSError, f"the GGUF file {named!r} cannot be read", "give another copy.")


def load_tokenizer(name: str | os.PathLike, gguf_file: str | None = None, **arguments: Any) -> Any:
    """The tokenizer of a model, in its folder, repository or GGUF file; a fast one, where there is one."""
    place, file = split_gguf(os.fspath(name)) if gguf_file is None else (os.fspath(name), gguf_file)
    if file is None:
        tokenizer = AutoTokenizer.from_pretrained(place, **arguments)
        if getattr(tokenizer, "is_fast", False):
            return tokenizer
        # mistral-common's tokenizer comes first where it is installed; the file of a fast one often lies beside its own
        hub: dict[str, Any] = {name: arguments[name] for name in PLACE_ARGUMENTS & set(arguments)}
        fast = cached_file(place, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **hub)
        return tokenizer if fast is None else PreTrainedTokenizerFast.from_pretrained(place, **arguments)
    with reading_gguf(os.path.join(place, file)):
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file, **arguments)
        config = AutoConfig.from_pretrained(place, gguf_file=file, **arguments)
    for kind in ("bos", "eos", "unk", "pad"):  # older versions guess some of them, where the file says them all
        if (number := getattr(config, f"{kind}_token_id", None)) is not None:
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(number))
    tokenizer.name_or_path = place
    return tokenizer


def fingerprint(base: Any, config: DraftHeadConfig) -> tuple[list[str], dict[str, Any]]:
    """What a base is, by which a change is found: the files of the named one, and by name a print of every tensor; None
    of one that is in those files, with which all its values are compared."""
    named, own = _files_of(base, config), tensors_of(base)
    stored = {name for file in named for name in safe_open(file, framework="pt").keys()}
    return named, {name: None if name in stored and _is_ordinary(own[name]) else _print(own[name]) for name in own}


def _place_of(config: DraftHeadConfig) -> dict[str, Any]:
    """Where, in what a config names as its base, the files of it lie on this machine."""
    revision, subfolder = config.base_model_revision or "main", config.base_subfolder or ""
    return {"revision": revision, "subfolder": subfolder, "local_files_only": True}


def _files_of(base: Any, config: DraftHeadConfig) -> list[str]:
    """The safetensors files, here, of the base that a config names; none if this one has another form."""
    with suppress(OSError, ValueError):
        if quantizer_of(base) is None and config.base_gguf_file is None:
            return files.checkpoint_files(str(config.base_model_name_or_path), _place_of(config))
    return []


def tensors_of(base: Any) -> dict[str, Tensor]:
    """The tensors of a base without its adapters, each by its first name; torch.ao's layers list more."""
    named = plain(base).state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(named.items())}
    own = {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor) and first[id(tensor)] == name}
    return {name: tensor.detach() for name, tensor in own.items()}


def _print(tensor: Any) -> tuple[Any, Tensor]:
    """The form of a tensor with the count of its writes; and a few of its values, none where they cannot be read."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    form = tuple(tensor.shape), type(tensor), tensor.dtype.is_floating_point
    writes = None if local.is_inference() else local._version
    flat = local.detach().reshape(-1) if _is_ordinary(local) else torch.empty(0)
    return (form, writes), flat[:: max(1, flat.numel() // SAMPLES)].clone().cpu()


def _is_ordinary(tensor: Any) -> bool:
    """Whether the values of a tensor are what it computes with, and at hand."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta


def _same(before: Tensor, now: Tensor) -> bool:
    """Whether values are what they were, converted to the type that they have now."""
    before = before.to(now)
    same_shape = before.shape == now.shape
    return torch.equal(before, now) or (same_shape and torch.allclose(before, now, rtol=0, atol=0, equal_nan=True))


def change_of_base(
    base: Any, config: DraftHeadConfig, as_loaded: Any, given: Mapping[str, Tensor], folder: Path
) -> str | None:
    """Why a base is not the one that a config names; None if it is. Adapters do not count: they are always saved.

    All values of tensors that have the same name in files of it are compared; of others, what was noted when it was
    loaded. Tensors that are `given` stand in the place of its own; heads are about to be saved in a folder.
    """
    name = config.base_model_name_or_path
    if config.base_included:
        return "it came with the heads"
    if not name or is_missing_folder(name) or as_loaded is None:
        return f"there is no {name!r}" if name else "it has no name"
    if os.path.realpath(name) in map(os.path.realpath, (folder, folder / BASE_FOLDER)):
        return "its files are where the model is saved"
    for parameter, tensor in plain(base).named_parameters():
        if tensor.requires_grad:
            return f"{parameter} is being trained"
    if (quantizer := quantizer_of(base)) is not None and not quantizer.pre_quantized:
        return "it was quantized when it was loaded"
    if os.path.isdir(name) and not any(file.suffix in WEIGHT_SUFFIXES for file in Path(name).iterdir()):
        return f"there are no weights in {name!r}"
    with suppress(OSError, ValueError):
        there = base.config if config.base_gguf_file else type(base.config).from_pretrained(name, **_place_of(config))
        ours, theirs = (_computed(one.to_dict()) for one in (base.config, there))
        if others := [field for field in ours | theirs if ours.get(field) != theirs.get(field)]:
            return f"its config has another {others[0]} than in {name!r}"
    noted, prints = as_loaded
    rest = {key: given.get(key, tensor).detach() for key, tensor in tensors_of(base).items()}
    if others := sorted(set(rest) ^ set(prints)):
        return f"{others[0]} came or went"
    for file in filter(os.path.isfile, _files_of(base, config) or noted):
        with safe_open(file, framework="pt") as stored:
            for key in filter(lambda key: key in rest and _is_ordinary(rest[key]), stored.keys()):
                if not _same(stored.get_tensor(key), rest.pop(key)):
                    return f"{key} has another shape or other values than in {name!r}"
    for key, (form, values) in ((key, _print(tensor)) for key, tensor in rest.items()):
        if prints[key] is None or form != prints[key][0] or not _same(prints[key][1], values):
            return f"{key} has another shape, form or other values"
    return None


def _computed(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config, and of those in it, that say what a model computes."""
    kept = {name: value for name, value in fields.items() if name not in NOT_COMPUTED}
    return {name: _computed(value) if isinstance(value, dict) else value for name, value in kept.items()}


@contextmanager
def replacing(folder: Path, is_main_process: bool = True) -> Iterator[Path]:
    """A new folder inside `folder`, whose files take their places there when all are written, config.json last; all
    that was there is put back if one of them cannot. Then weights go that an earlier save left."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as name, ExitStack() as undo:
        new = Path(name, "new")
        new.mkdir()
        yield new
        if not is_main_process:
            return
        written = [place.relative_to(new) for place in new.rglob("*") if place.is_file()]
        written.sort(key=lambda file: (file == Path(CONFIG_NAME), file))
        for number, file in enumerate(written):
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
        there = [place.relative_to(folder).as_posix() for place in (*folder.glob("*"), *folder.glob("base/*"))]
        for name in outdated(there, [file.as_posix() for file in written]):
            if name.startswith("adapter_"):  # perhaps the only copy
                (folder / ASIDE).mkdir(exist_ok=True)
                shutil.copy2(folder / name, folder / ASIDE)
                logger.warning(f"{str(folder / name)!r} would be loaded with the heads: it lies in {ASIDE} there now.")
            (folder / name).unlink()


def outdated(there: Iterable[str], written: Collection[str]) -> list[str]:
    """Files of a folder or repository that would be read as weights in the place of those that were written to it."""
    places = {os.path.dirname(name) for name in written if WEIGHT_FILES.fullmatch(name)}
    weights = [name for name in there if WEIGHT_FILES.fullmatch(name) and os.path.dirname(name) in places]
    return [name for name in weights if name not in written]
