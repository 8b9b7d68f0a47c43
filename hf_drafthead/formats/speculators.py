"""EAGLE-3 heads as the speculators library saves them, with which `vllm serve FOLDER` starts base and head.

The tensors are those of the other EAGLE-3 layouts, with `layers.0.*`. config.json says on its top level what kind of
head it is (`speculators_model_type` and the flags), in `transformer_layer_config` what its layer is, and in
`speculators_config` what its base is. `norm_before_residual` is always written: where it is missing, that library takes
it for false and vLLM for true.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from hf_drafthead.formats.disk import Source
from hf_drafthead.formats.eagle3 import MASK_STATES, OF_ALL, pair_fields, read_pair_head, said_features, split_tensors
from hf_drafthead.formats.fields import llama_fields
from hf_drafthead.formats.layout import KIND, SET, Files, Heads, Layout, SavedHeads
from hf_drafthead.formats.tables import YES, Limits
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.eagle3 import Eagle3ForCausalLM
from hf_drafthead.modeling.peagle import PEagleForCausalLM

VERSION = "0.9.0"  # of the library whose format is written
SPECULATIVE_TOKENS = 5  # that vLLM drafts at a time, if the command line does not say
LAYERS = {"llama": "llama", "mistral": "llama", "qwen3": "qwen3"}
START = "vllm serve FOLDER starts the base with the head."


class Speculators(Layout):
    """A head with the name of its base."""

    name = "speculators"
    family: ClassVar[type[DraftHeadPreTrainedModel]] = Eagle3ForCausalLM
    targets = ("speculators",)
    kinds = ("eagle3",)
    limits: ClassVar[Limits] = {"": OF_ALL | {"layer_model_type": tuple(LAYERS), "as_wide_as_base": YES}}
    holds_vocabulary = True

    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        config = source.config
        if "norm_before_residual" not in config and fields.get("norm_before_residual") is None:
            what = "does not say norm_before_residual, which speculators takes for false and vLLM for true"
            raise ValueError(f"{source.name!r} {what}: say which by norm_before_residual=True or =False ({SET}).")
        layer = config.get("transformer_layer_config") or {}
        return read_pair_head(self, source, layer, said_features(source, fields), verifier_of(config))

    def write(self, saved: SavedHeads, target: str) -> Files:
        config, layer = saved.config, saved.config.own_layer
        tensors, notes = split_tensors(saved, "layers.0.")
        biased = any(key.startswith("layers.") and key.endswith("o_proj.bias") for key in tensors)
        layer_fields = llama_fields(layer, saved.text.vocab_size) | {
            "model_type": LAYERS[layer.model_type],
            "num_hidden_layers": config.num_layers,
            "attention_bias": biased,
            "mlp_bias": bool(getattr(layer, "mlp_bias", False)),
        }
        if config.window is not None:
            layer_fields |= {"sliding_window": config.window, "layer_types": ["sliding_attention"] * config.num_layers}
        about = pair_fields(saved) | {"target_hidden_size": None}
        if self.family is PEagleForCausalLM:
            tensors[MASK_STATES] = tensors[MASK_STATES][None, None]
            about |= {"mask_token_id": config.mask_token_id}
            about |= speculator(saved, "peagle", "PEagleSpeculator", layer_fields)
        else:
            about |= speculator(saved, "eagle3", "Eagle3Speculator", layer_fields, SPECULATIVE_TOKENS)
        if not config.own_embeddings:
            notes.append(
                "embeddings are not in the file: vLLM takes the base's; in the speculators library (0.9.0) "
                "fill embed_tokens.weight with NaN before load_verifier_weights(), or they stay uninitialized."
            )
        return Files(tensors, about, [*notes, START])


class SpeculatorsPEagle(Speculators):
    """A P-EAGLE head of that library."""

    name = "speculators (peagle)"
    family = PEagleForCausalLM
    kinds = ("peagle",)

    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        heads = super().read(source, fields)
        proposals = (source.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        if (tokens := proposals[0].get("speculative_tokens")) is not None:
            heads.fields["num_draft_heads"] = tokens
        return heads


def verifier_of(config: Mapping[str, Any]) -> str | None:
    """The base that a config.json names."""
    return ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")


def speculator(
    saved: SavedHeads, kind: str, architecture: str, layer: Mapping[str, Any], most: int | None = None
) -> dict[str, Any]:
    """What config.json says of any head: its kind, layers and base, and how many tokens are drafted at a time."""
    tokens = min(saved.config.num_draft_heads, most or saved.config.num_draft_heads)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        KIND: kind,
        "speculators_version": VERSION,
        "architectures": [architecture],
        "tie_word_embeddings": False,
        "dtype": saved.dtype,
        "transformer_layer_config": dict(layer),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": saved.base, "architectures": list(saved.text.architectures or [])},
        },
    }
