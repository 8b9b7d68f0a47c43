"""The modules for multi-token prediction as they lie in a base's own repository, where transformers drops them.

What they are called, by architecture, is in NAMES: parts that join an embedding and a hidden state, behind `model.` or
`model.language_model.`, and the block beside them under the names of the base's layers. The speculators library saves
a module that was trained further under MiMo's names, embedding first.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from hf_drafthead.formats.base_tensors import INPUT, OUTPUT, base_tensor, same_values
from hf_drafthead.formats.disk import read_pickle
from hf_drafthead.formats.gguf import gguf_blocks
from hf_drafthead.formats.layout import Loss
from hf_drafthead.formats.tables import renamed
from hf_drafthead.modeling.base_model import split_gguf
from hf_drafthead.modeling.decoder_layer import one_layer_config, types_of
from hf_drafthead.modeling.files import PICKLE, WEIGHTS, fetch_file, in_one_line, map_tensors, read_json
from hf_drafthead.modeling.mtp import MTP_KINDS, MtpConfig, MtpKind, modules_counted, own_block

Names = tuple[tuple[str, str], ...]


def _names(block: str, beside: str, **parts: str) -> Names:
    """Ours and theirs: parts that stand beside the block's tensors, then the block's own."""
    return (*((f"{ours}.", f"{beside}{theirs}.") for ours, theirs in parts.items()), ("body.layer.", block))


JOINED = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "fc": "eh_proj"}
BEHIND = {**JOINED, "embed_tokens": "embed_tokens"}  # the base's own layers
LAYERS, OF_MIMO, OF_V2 = "layers.{layer}.", "mtp_layers.{i}.", "mtp.layers.{i}."
DEEPSEEK = _names(LAYERS, LAYERS, **BEHIND, norm="shared_head.norm", lm_head="shared_head.head")
HUNYUAN = _names(LAYERS, LAYERS, **BEHIND, norm="final_layernorm")
TRANSFORMER = {"norm": "transformer.shared_head.norm", "lm_head": "transformer.shared_head.output"}
STEP = _names(LAYERS, LAYERS, **BEHIND, **TRANSFORMER)
PRE_FC = {"embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden"}
ALIKE = {name: name for name in ("fc", "norm", "embed_tokens", "lm_head")}
QWEN = _names("mtp.layers.{i}.", "mtp.", **PRE_FC, **ALIKE)
TOKEN_NORM = {"embedding_norm": "token_layernorm", "hidden_norm": "hidden_layernorm"}
MIMO = _names(OF_MIMO, OF_MIMO, **TOKEN_NORM, fc="input_proj", norm="final_layernorm")
MLP_NORM = {"body.layer.post_attention_layernorm": "pre_mlp_layernorm"}  # in front of the block, a part of it
MIMO_V2 = _names(OF_V2, OF_V2, **JOINED, norm="final_layernorm", **MLP_NORM)
NUMBERED = {"embedding_norm": "emb_norm.{i}", "hidden_norm": "hidden_norm.{i}", "fc": "linear_proj.{i}"}
ERNIE = _names("mtp_block.{i}.", "mtp_", **NUMBERED)
# Its block is layers of one mixer each, one behind the other; the last one has the norm.
NEMOTRON = (("norm.", "mtp.layers.{last}.final_layernorm."), *_names("mtp.layers.", "mtp.layers.0.", **JOINED))
LONGCAT_PARTS = {"norm": "norm", "embed_tokens": "embed_tokens", "body.layer.mlp": "layers.0.transformer_layer.mlp"}
LONGCAT_PARTS |= {"embedding_norm": "layers.0.enorm.m", "hidden_norm": "layers.0.hnorm.m", "fc": "layers.0.eh_proj"}
LONGCAT = _names("mtp.layers.0.", "mtp.", **LONGCAT_PARTS)
# By model_type of the base's text config; others may have any of them: what is read, the files tell.
NAMES = {
    "hy_v3": HUNYUAN,
    **dict.fromkeys(("step3p5", "step3p7"), STEP),
    "mimo": MIMO,
    "mimo_v2_flash": MIMO_V2,
    "ernie4_5_moe": ERNIE,
    "nemotron_h": NEMOTRON,
    "longcat_flash": LONGCAT,
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "glm_ocr_text"), DEEPSEEK),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "exaone4", "exaone_moe", "mellum"), QWEN),
}
# Whose modules are of another form, which no family here has.
OTHER_FORMS = dict.fromkeys(("inkling", "inkling_text"), "layers without rotary positions")
OTHER_FORMS |= dict.fromkeys(("qwen4_exp_text", "deepseek_v4"), "hyper-connections")
OTHER_FORMS |= dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "glm5_next"), "attention that chooses keys by score")
ROOT = r"(?:model\.|language_model\.)*"
BLOCK = "body.layer."  # of a module here
COPIES = {"embed_tokens.weight": INPUT, "lm_head.weight": OUTPUT}
SCALES = ("_scale_inv", "_scale")  # of blocks of an FP8 weight, of its rows or of all of it, behind its name
BESIDE = ("mtp.safetensors", "mtp.bin")  # files of modules that an index may leave out


@dataclass(frozen=True)
class StoredModules:
    """The modules in a repository: the file that holds each tensor, and by its name there its module and name here."""

    place: str
    files: dict[str, str]
    ours: dict[str, tuple[int, str]]
    block: Sequence[int] = ()  # of a scale of an FP8 weight, rows and columns, where the repository says it

    def tensors(self) -> list[dict[str, Tensor]]:
        """By module, under the names here; FP8 is unpacked, in blocks as wide as its scales say."""
        stored: dict[str, Tensor] = {}
        for file in sorted(set(self.files.values())):
            opened = _tensors_of(file)
            keys = [key for key, holder in self.files.items() if holder == file]
            if lost := sorted(set(keys) - set(opened)):
                raise OSError(f"{file!r} lacks {lost[0]!r}, which the index says is there: download it again.")
            stored |= {key: opened[key] for key in keys}
        scales = {key: stored[key + end] for key in stored for end in SCALES if key + end in stored}
        left_out = {key + end for key in scales for end in SCALES}  # and scales of activations, not quantized here
        plain = {key: at for key, at in self.ours.items() if not (key in left_out or key.endswith("input_scale"))}
        return by_module(plain, lambda key: self._plain(key, stored[key], scales.get(key)))

    def _plain(self, key: str, tensor: Tensor, scale: Tensor | None) -> Tensor:
        """The numbers of a tensor, which are packed in eight bits if there is a scale."""
        packed = f"{self.place!r} holds {key!r} {list(tensor.shape)} of its module for multi-token prediction"
        plain = tensor.is_floating_point() and tensor.dtype.itemsize >= 2
        if scale is None and plain:
            return tensor
        if scale is None or plain:
            why = "of which nothing says how it is unpacked" if scale is None else "which is not packed, beside a scale"
            what = f"{str(tensor.dtype).removeprefix('torch.')}, {why}"
            raise ValueError(f"{packed} in {what}: take it from the original repository, with modules_from=.")
        wide = scale.reshape(scale.shape + (1,) * (tensor.dim() - scale.dim())).float()  # one for all, or for each row
        blocks = [1] * (tensor.dim() - len(self.block)) + [*self.block]
        for dim, (size, block) in enumerate(zip(tensor.shape, blocks)):
            count = wide.shape[dim] if wide.dim() == tensor.dim() else 0
            if count != -(-size // block) and (not count or size % count):
                what = f"with scales {list(scale.shape)}, which are not those of its blocks, its rows or all of it"
                raise ValueError(f"{packed} {what}: download it again.")
            block = block if count == -(-size // block) else size // count
            wide = wide.repeat_interleave(block, dim).narrow(dim, 0, size)
        return (tensor.float() * wide).to(torch.bfloat16)


def find_modules(place: str, text: PreTrainedConfig, hub: Mapping[str, Any]) -> StoredModules | None:
    """The modules that a repository holds, by its index alone; None if it holds none."""
    shards = _shards(place, hub)
    indexed = modules_in(shards, text)
    if indexed is None:
        shards = _beside(place, set(shards.values()), bool(modules_counted(text)), hub)
        indexed = modules_in(shards, text)
    if indexed is None:
        return None
    form, kind = OTHER_FORMS.get(text.model_type), MTP_KINDS.get(text.model_type, MtpKind())
    if not kind.rotary and own_block(text, kind) is None:
        form = f"the layers {text.mtp_layers_block_type}, of which its config counts {modules_counted(text)}"
    if form is not None:
        what = f"has modules for multi-token prediction with {form}, which are not known here"
        raise ValueError(f"{place!r} {what}: train heads of another family for it.")
    files = {}
    for key in indexed:
        if (file := fetch_file(place, shards[key], hub)) is None:
            index = f"{WEIGHTS if shards[key].endswith('.safetensors') else PICKLE}.index.json"
            raise OSError(f"{place!r} lacks {shards[key]}, which its {index} names: download it again.")
        files[key] = file
    config = fetch_file(place, "config.json", hub)
    return StoredModules(place, files, indexed, next(_blocks_in(read_json(config) if config else {}), ()))


def _blocks_in(said: Any) -> Iterator[Sequence[int]]:
    """How many rows and columns of a weight have one scale, wherever a config says it."""
    for key, value in said.items() if isinstance(said, Mapping) else ():
        if key in ("weight_block_size", "block_structure") and isinstance(value, list):
            yield value
        yield from _blocks_in(value)


def modules_in(keys: Iterable[str], text: PreTrainedConfig, *only: Names) -> dict[str, tuple[int, str]] | None:
    """Of tensors of these names those of modules: by name the module and the name here; None if there are none.

    only: under which names; by default under those of the base's architecture, else under any.
    """
    keys = list(keys)
    for names in only or (NAMES.get(text.model_type, DEEPSEEK), DEEPSEEK, QWEN, MIMO, MIMO_V2, ERNIE):
        if modules := dict(_modules_named(keys, names, text.num_hidden_layers)):
            if missing := sorted(set(range(max(modules))) - set(modules)):
                what = f"number {missing[0]} is missing, and number {max(modules)} is there"
                raise ValueError(f"of the modules for multi-token prediction {what}: download them again.")
            theirs = {
                index: [(root + _of_module(there, index, text), ours) for ours, there in names]
                for index, root in modules.items()
            }
            found = [(key, index, renamed(key, theirs[index])) for index in modules for key in keys]
            return {key: (index, name) for key, index, name in found if name is not None}
    return None


def by_module(ours: Mapping[str, tuple[int, str]], tensor: Callable[[str], Any]) -> list[dict[str, Any]]:
    """Of each module, by the names here, what `tensor` gives for the names there."""
    modules: list[dict[str, Any]] = [{} for _ in range(1 + max((index for index, _ in ours.values()), default=0))]
    for key, (index, name) in ours.items():
        modules[index][name] = tensor(key)
    return modules


def form_of(modules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Config fields that follow from which tensors there are."""
    parts = {"own_embeddings": "embed_tokens.weight", "own_lm_heads": "lm_head.weight", "output_norm": "norm.weight"}
    has = {field: any(part in module for module in modules) for field, part in parts.items()}
    return {"num_modules": len(modules), **has}


def _shards(place: str, hub: Mapping[str, Any]) -> dict[str, str]:
    """By name of every tensor, the name of the file that holds it; empty where there are none."""
    for name in (WEIGHTS, PICKLE):
        if (index := fetch_file(place, f"{name}.index.json", hub)) is not None:
            return dict(read_json(index).get("weight_map") or {})
        if (file := fetch_file(place, name, hub)) is not None:
            return dict.fromkeys(_tensors_of(file), name)
    return {}


def _beside(place: str, known: set[str], counted: bool, hub: Mapping[str, Any]) -> dict[str, str]:
    """As `_shards`, of files that no index names: of a folder all, of a repository those that modules are named for.

    counted: whether the config says that there are modules; a repository is not asked for files otherwise.
    """
    names = [name for name in BESIDE if counted]
    if os.path.isdir(place):
        names = sorted(file.name for file in Path(place).iterdir() if file.suffix in (".safetensors", ".bin"))
    files = {name: fetch_file(place, name, hub) for name in names if name not in known}
    return {key: name for name, file in files.items() if file is not None for key in _tensors_of(file)}


def _tensors_of(file: str) -> Mapping[str, Tensor]:
    """The tensors of a file, mapped from disk where it allows it."""
    return map_tensors([file]) if file.endswith(".safetensors") else read_pickle(file)


def _modules_named(keys: Iterable[str], names: Names, layers: int) -> Iterator[tuple[int, str]]:
    """Number and root of every module of which there is a joining layer under these names."""
    numbered = re.escape(dict(names)["fc."]).replace(r"\{layer\}", r"(\d+)").replace(r"\{i\}", r"(\d+)")
    first = layers if "{layer}" in dict(names)["fc."] else 0
    for key in keys:
        if (match := re.fullmatch(f"({ROOT}){numbered}weight", key)) is not None:
            index = int(match[2]) - first if match.lastindex == 2 else 0
            if index >= 0:
                yield index, match[1]


def _of_module(theirs: str, index: int, text: PreTrainedConfig) -> str:
    """A name of a module's part with the numbers that it has there."""
    last = len(getattr(text, "mtp_layers_block_type", None) or [None]) - 1
    return theirs.format(i=index, layer=text.num_hidden_layers + index, last=last)


def as_here(config: MtpConfig, modules: Sequence[Mapping[str, Tensor]], place: str) -> dict[str, Tensor]:
    """The drafter's tensors, of modules at a place whose blocks have the names of the base's files."""
    drafter_tensors = {}
    for index, tensors in enumerate(modules):
        module = {name: tensor for name, tensor in tensors.items() if not name.startswith(BLOCK)}
        inside = {name.removeprefix(BLOCK): tensor for name, tensor in tensors.items() if name.startswith(BLOCK)}
        module |= {f"{BLOCK}{name}": tensor for name, tensor in block_as_here(config, inside, place).items()}
        if "embed_tokens.weight" in module:
            drafter_tensors["embed_tokens.weight"] = module.pop("embed_tokens.weight")
        drafter_tensors |= {f"mtp.{index}.{name}": tensor for name, tensor in module.items()}
    return drafter_tensors


def block_as_here(config: MtpConfig, tensors: Mapping[str, Tensor], place: str) -> dict[str, Tensor]:
    """A block's tensors as transformers names and joins them, experts side by side: by its own loading."""
    small, model_class = _one_layer(config)
    layer = _layer(config)
    whole = {f"{layer}{name}": tensor for name, tensor in _scaled(config, tensors, 1).items()}
    with torch.device("meta"), no_init_weights():  # a loading without the other parts would be reported
        others = {name: tensor for name, tensor in model_class(small).state_dict().items() if name not in whole}
    whole |= {name: torch.zeros(tensor.shape) for name, tensor in others.items() if not name.startswith("layers.")}
    try:
        model, info = model_class.from_pretrained(None, config=small, state_dict=whole, output_loading_info=True)
    except RuntimeError as error:  # of shapes
        what = f"a module whose block is no {small.model_type!r} layer of the base's sizes ({in_one_line(error)})"
        raise ValueError(f"{place!r} has {what}: get it again.") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if wrong := sorted(str(key).removeprefix(layer) for key in info[kind]):
            what = f"a module for multi-token prediction whose block has {kind.replace('_', ' ')} {wrong[:3]}"
            raise ValueError(f"{place!r} has {what} for a {small.model_type!r} layer of its base: download it again.")
    return {name.removeprefix(layer): tensor for name, tensor in model.state_dict().items() if name.startswith(layer)}


def block_as_stored(config: MtpConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A block's tensors under the names of the base's files: by transformers' own saving."""
    small, model_class = _one_layer(config)
    model = model_class(small).to(next(iter(tensors.values())).dtype)
    layer, plain = _layer(config), _scaled(config, tensors, -1)
    model.load_state_dict({f"{layer}{name}": tensor for name, tensor in plain.items()}, strict=False)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stored = map_tensors(str(file) for file in Path(folder).glob("*.safetensors"))
        return {name.partition(layer)[2]: stored[name].clone() for name in stored if layer in name}


def as_stored(config: MtpConfig, tensors: Mapping[str, Tensor], names: Names, root: str) -> dict[str, Tensor]:
    """The drafter's tensors under other names: those of a base's files, or of the speculators library."""
    stored: dict[str, Tensor] = {}
    for index in range(config.num_modules or 1):
        prefix = f"mtp.{index}."
        module = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        inside = {name.removeprefix(BLOCK): module.pop(name) for name in list(module) if name.startswith(BLOCK)}
        module |= {f"{BLOCK}{name}": tensor for name, tensor in block_as_stored(config, inside).items()}
        if "embed_tokens.weight" in tensors:
            module["embed_tokens.weight"] = tensors["embed_tokens.weight"]
        for name, tensor in module.items():
            theirs = renamed(name, names)
            if theirs is None:
                raise Loss(f"its modules have {name!r}, for which the target has no name", "train it without")
            there = root + _of_module(theirs, index, config.get_text_config())
            if stored.setdefault(there, tensor) is not tensor:
                raise Loss("it has several modules, and the target has names for one", "train it with num_modules=1")
    return stored


def _layer(config: MtpConfig) -> str:
    """What the names of a block begin with in a model that has no other layers."""
    return "layers.0." if len(types_of(config.own_layer)) == 1 else "layers."


def _scaled(config: MtpConfig, tensors: Mapping[str, Tensor], power: int) -> dict[str, Tensor]:
    """A block's tensors with the factors of LongCat's attention, which DeepSeek's has not, in the weights of norms."""
    text, scaled = config.get_text_config(), dict(tensors)
    if text.model_type == "longcat_flash":
        for name, rank in {"q_a_layernorm": text.q_lora_rank, "kv_a_layernorm": text.kv_lora_rank}.items():
            if (key := f"self_attn.{name}.weight") in scaled:
                scaled[key] = scaled[key] * (text.hidden_size / rank) ** (power / 2)
    return scaled


def _one_layer(config: MtpConfig) -> tuple[PreTrainedConfig, Any]:
    small = one_layer_config(config.own_layer, types_of(config.own_layer))
    small.bos_token_id = small.eos_token_id = None  # which would lie beyond its vocabulary
    return small, MODEL_MAPPING[type(small)]


def own_modules(
    config: MtpConfig, base: nn.Module, place: str, hub: Mapping[str, Any], required: bool = False
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """The modules of a base in a repository: fields of the config, and the drafter's tensors.

    None if it has none, the base's config counts none, and none is `required`. Copies of the base's embeddings and
    lm_head are dropped. OSError: a file is missing or cannot be read; ValueError: there are none though there should
    be, a form or a type that is not known here, or tensors that do not fit the base.
    """
    stored = _stored(config, place, hub)
    if stored is None:
        counted = modules_counted(config.get_text_config())
        if not counted and not required:
            return None
        note = f", though its config counts {counted}" if counted else ""
        what = f"no module for multi-token prediction{note}: merging, quantizing and save_pretrained lose them"
        advice = f"take them from the original repository with modules_from={named_base(place, hub) or 'ORIGINAL'!r}"
        raise ValueError(f"{place!r} holds {what}; {advice}, or train fresh ones with modules_from=False.")
    if len(stored) < (wanted := config.num_modules or 1):
        what = f"holds {len(stored)} of the {wanted} modules for multi-token prediction that its config counts"
        raise ValueError(f"{place!r} {what}: download it again, or say num_modules={len(stored)}.")
    if broken := [name for module in stored for name, tensor in module.items() if not tensor.isfinite().all()]:
        raise ValueError(f"{place!r} has modules with NaN or infinity in {broken[0]!r}: download it again.")
    for name, which in COPIES.items():
        own = base_tensor(base, which)
        if all(own is not None and same_values(module[name], own) for module in stored if name in module):
            for module in stored:
                module.pop(name, None)
    fields, kind = form_of(stored), config.get_text_config().model_type
    if kind in NAMES and MTP_KINDS.get(kind, MtpKind()).output_norm and not fields["output_norm"]:
        raise ValueError(f"{place!r} has modules without the norm behind their block: download it again.")
    return fields, as_here(config, stored, place)


def _stored(config: MtpConfig, place: str, hub: Mapping[str, Any]) -> list[dict[str, Tensor]] | None:
    """The tensors of the modules at a place, which may be a GGUF file, as the base's may be; None: it has none."""
    text, (folder, file) = config.get_text_config(), split_gguf(place)
    if file is None and place == config.base_model_name_or_path:
        file = config.base_gguf_file
    if file is None:
        stored = find_modules(place, text, hub)
        return None if stored is None else stored.tensors()
    tensors = gguf_blocks(folder, file, text.num_hidden_layers, hub)
    named = modules_in(tensors, text, DEEPSEEK)
    return None if named is None else by_module(named, tensors.__getitem__)


def named_base(place: str, hub: Mapping[str, Any]) -> str | None:
    """The model that a repository says it was made of, by its card's `base_model`."""
    with suppress(OSError, ValueError):
        if (card := fetch_file(place, "README.md", hub)) is not None:
            named = ModelCard.load(card).data.get("base_model")
            return next(iter(named), None) if isinstance(named, list) else named
    return None
