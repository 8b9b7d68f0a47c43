"""Modules for multi-token prediction on their own: under the names of a base's files, and as speculators saves them.

The first is a part of the base's repository beside the base's config.json, which says what they are. The second,
"mtp" in its config.json, is one module under MiMo's names with copies of the base's embeddings and lm_head:

    mtp_layers.0.{token_layernorm, hidden_layernorm, final_layernorm}.weight [H], mtp_layers.0.input_proj.weight [H, 2H]
    mtp_layers.0.*                                          the block; embed_tokens.weight, lm_head.weight [V, H]
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_drafthead.formats.base_tensors import read_base_tensor
from hf_drafthead.formats.disk import Joined, Source
from hf_drafthead.formats.eagle import COPIES_OF_BASE
from hf_drafthead.formats.layout import Files, Heads, Layout, Loss, Reader, SavedHeads
from hf_drafthead.formats.mtp import MIMO, NAMES, NEMOTRON, QWEN, as_here, as_stored, by_module, form_of, modules_in
from hf_drafthead.formats.speculators import speculator, verifier_of
from hf_drafthead.formats.tables import NO, YES, Limits
from hf_drafthead.modeling.decoder_layer import types_of
from hf_drafthead.modeling.mtp import MTP_KINDS, MtpConfig, MtpForCausalLM, MtpKind, own_block

AS_PUBLISHED = {"feed_normed": YES}  # whatever reads these files goes on from the normed output
ONE_MODULE = AS_PUBLISHED | {"num_modules": (1,), "block_layers": (1,)}
PLACE = "put the file into a copy of the base's repository, as mtp.safetensors, and its names into "
PLACE += "model.safetensors.index.json: engines read modules from there."
SERVED = 'vllm serve BASE --speculative-config \'{{"method": "mtp", "num_speculative_tokens": {}}}\''


class BaseModules(Layout):
    """Modules under the names that they have in the base's own repository."""

    name = "a base's modules"
    family = MtpForCausalLM
    targets = ("base",)
    limits: ClassVar[Limits] = {"": AS_PUBLISHED}

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        text = text_config_of(config)
        names = dict.fromkeys(keys)
        modules = None if text is None else modules_in(names, text)
        return modules is not None and set(modules) == set(names)

    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        base, reader = text_config_of(source.config), Reader(source.name, source.tensors)
        assert base is not None, "detected by it"
        modules = by_module(modules_in(source.tensors, base) or {}, reader.take)
        form = form_of(modules)
        return heads_of(self, reader, MtpConfig(base_config=base, **form), modules, form)

    def write(self, saved: SavedHeads, target: str) -> Files:
        config, text = saved.config, saved.text
        kind, names = MTP_KINDS.get(text.model_type, MtpKind()), NAMES.get(text.model_type)
        if names is None:
            what = f"a {text.model_type!r} base has no modules of its own, and so no names for them"
            raise Loss(what, "export it as speculators")
        block, own = own_block(text, kind), config.own_layer
        alike = block is not None and (own.model_type, types_of(own)) == (block.model_type, types_of(block))
        if bool(config.hidden_first) != kind.hidden_first or not alike:
            advice = "train it without hidden_first=, layer_config="
            raise Loss("its modules are not of the form that this base has", advice)
        root = "model." if config.base_config.model_type == text.model_type else "model.language_model."
        tensors = as_stored(config, saved.tensors, names, "" if names in (QWEN, NEMOTRON) else root)
        return Files(tensors, config.base_config.to_dict(), [PLACE, SERVED.format(config.num_modules)])


class SpeculatorsMtp(Layout):
    """One module as the speculators library saves it."""

    name = "speculators (mtp)"
    kinds = ("mtp",)
    family = MtpForCausalLM
    targets = ("speculators",)
    limits: ClassVar[Limits] = {"": ONE_MODULE | dict.fromkeys(("hidden_first", "own_embeddings", "own_lm_heads"), NO)}

    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        reader, config = Reader(source.name, source.tensors), source.config
        layer = text_config_of(config.get("transformer_layer_config") or {})
        if layer is None:
            what = "has no transformer_layer_config of a model that transformers knows"
            raise ValueError(f"{source.name!r} {what}: correct config.json.")
        copies = reader.copies(COPIES_OF_BASE)
        modules = by_module(modules_in(source.tensors, layer, MIMO) or {}, reader.take)
        form = form_of(modules) | {"hidden_first": False}
        more = {"copies": copies, "vocab_size": layer.vocab_size, "base": verifier_of(config)}
        return heads_of(self, reader, MtpConfig(base_config=layer, **form), modules, form, **more)

    def write(self, saved: SavedHeads, target: str) -> Files:
        config, text = saved.config, saved.text
        tensors = as_stored(config, saved.tensors, MIMO, "")
        tensors |= {name: read_base_tensor(saved, which) for name, which in COPIES_OF_BASE.items()}
        layer = {**text.to_dict(), "model_type": text.model_type}
        about = speculator(saved, "mtp", "MTPDraftModel", layer) | {"num_nextn_predict_layers": 1}
        return Files(tensors, about, ["vllm serve FOLDER starts the base with the module."])


def text_config_of(fields: Mapping[str, Any]) -> PreTrainedConfig | None:
    """The text config of a model's config.json; None where transformers knows no such model."""
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return None
    values = {name: value for name, value in fields.items() if name != "model_type"}
    try:
        return CONFIG_MAPPING[model_type](**values).get_text_config()
    except Exception:  # of the validation that every model's config has
        return None


def heads_of(
    layout: Layout, reader: Reader, config: MtpConfig, modules: list[dict[str, Any]], form: dict[str, Any], **more: Any
) -> Heads:
    """What was read, with blocks as transformers has them here."""
    drafter_tensors = as_here(config, modules, reader.name)
    tensors = {name: Joined((tensor,), tuple(tensor.shape), (name,)) for name, tensor in drafter_tensors.items()}
    return reader.heads(layout, form, tensors, hidden_size=config.get_text_config().hidden_size, **more)
