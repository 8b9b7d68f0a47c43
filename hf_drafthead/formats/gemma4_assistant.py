"""Gemma 4's assistants as Google publishes them and transformers saves them (`gemma4_assistant`).

pre_projection.weight [W, 2H], post_projection.weight [H, W]
model.layers.{i}.*, model.norm.weight [W]            Gemma 4's layers, without keys and values
lm_head.weight, or model.embed_tokens.weight [V, W]  one tensor, as no token is embedded by it
masked_embedding.centroids.weight [N, W], .token_ordering [V]     with use_ordered_embeddings
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from hf_drafthead.formats.disk import Source
from hf_drafthead.formats.fields import refuse_unknown
from hf_drafthead.formats.layout import Files, Heads, Layout, Reader, SavedHeads
from hf_drafthead.formats.mtp_layouts import text_config_of
from hf_drafthead.formats.tables import NO, Limits, Prefixes, renamed
from hf_drafthead.modeling.gemma4_assistant import LAYERS, GemmaAssistantForCausalLM

TYPES = {"gemma4_assistant": "Gemma4Assistant", "gemma4_unified_assistant": "Gemma4UnifiedAssistant"}
PREFIXES: Prefixes = [
    *((f"{part}.", f"{part}_projection.") for part in ("pre", "post")),
    *((f"body.{part}.", f"model.{part}.") for part in ("layers", "norm")),
    *((name, f"masked_embedding.{name}") for name in ("centroids.", "token_ordering")),
]
PROJECTION, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class GemmaAssistant(Layout):
    """An assistant of Gemma 4."""

    name = "Gemma 4 assistant"
    family = GemmaAssistantForCausalLM
    targets = ("transformers",)
    limits: ClassVar[Limits] = {"": {"reduced_vocabulary": NO}}

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        return {"pre_projection.weight", "post_projection.weight"} <= set(keys)

    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        config, reader = source.config, Reader(source.name, source.tensors)
        about = config.get("text_config") or {}
        layer = text_config_of(about)
        if layer is None or layer.model_type not in LAYERS:
            what = f"has no text_config of {' or '.join(map(repr, LAYERS))} that can be used"
            raise ValueError(f"{source.name!r} {what}: give the folder whose config.json has one.")
        known = (field for field in about if hasattr(type(layer), field))
        refuse_unknown(source.name, about, dict.fromkeys(known), " of its text_config")
        width, wide = reader.take("pre_projection.weight").shape
        clusters = config.get("num_centroids") if config.get("use_ordered_embeddings") else 0
        tensors = reader.renamed(PREFIXES)
        has_projection = PROJECTION in reader or config.get("tie_word_embeddings") is False
        projection = reader.one(PROJECTION if has_projection else EMBEDDING)
        if has_projection and EMBEDDING in reader:
            reader.drop(EMBEDDING, "embeddings that an assistant has no use for")
        form = {
            "layer_config": layer,
            "num_layers": layer.num_hidden_layers,
            "num_centroids": clusters or 0,
            "centroid_top_k": config.get("centroid_intermediate_top_k") or 32,
        }
        reader.note_differences(config, backbone_hidden_size=wide // 2)
        more = {"hidden_size": wide // 2, "vocab_size": projection.shape[0]}
        return reader.heads(self, form, tensors | {PROJECTION: projection}, **more)

    def write(self, saved: SavedHeads, target: str) -> Files:
        config, layer = saved.config, saved.config.own_layer
        tensors = {renamed(key, PREFIXES) or key: tensor for key, tensor in saved.tensors.items()}
        tensors[EMBEDDING] = tensors.pop(PROJECTION)
        kind = "gemma4_assistant" if layer.model_type == LAYERS[0] else "gemma4_unified_assistant"
        about = {
            "model_type": kind,
            "architectures": [f"{TYPES[kind]}ForCausalLM"],
            "text_config": {**layer.to_dict(), "vocab_size": len(tensors[EMBEDDING])},
            "backbone_hidden_size": config.width,
            "use_ordered_embeddings": bool(config.num_centroids),
            "num_centroids": config.num_centroids or 2048,
            "centroid_intermediate_top_k": config.centroid_top_k,
            "tie_word_embeddings": True,
            "dtype": saved.dtype,
        }
        launch = "model.generate(..., assistant_model=AutoModelForCausalLM.from_pretrained(FOLDER)) drafts a chain."
        return Files(tensors, about, [launch])
