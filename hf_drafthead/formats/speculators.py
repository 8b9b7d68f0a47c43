"""EAGLE-3 heads as the speculators library saves them, with which `vllm serve FOLDER` starts base and head.

The tensors are those of the other EAGLE-3 layouts, with `layers.0.*`. config.json says on its top level what kind of
head it is (`speculators_model_type` and the flags), in `transformer_layer_config` what its layer is, and in
`speculators_config` what its base is. `norm_before_residual` is always written: where it is missing, that library takes
it for false and vLLM for true.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from hf_drafthead.formats.disk import Source
from hf_drafthead.formats.eagle3 import (
    IDS,
    MASK_STATES,
    NORM_FLAGS,
    features_to_write,
    read_pair_head,
    refuse_without_auxiliary,
    split_tensors,
)
from hf_drafthead.formats.fields import llama_fields
from hf_drafthead.formats.layout import Files, Heads, Layout, Loss, SavedHeads
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.eagle3 import Eagle3ForCausalLM
from hf_drafthead.modeling.peagle import PEagleForCausalLM

VERSION = "0.9.0"  # of the library whose format is written
SPECULATIVE_TOKENS = 5  # that vLLM drafts at a time, if the command line does not say
LAYERS = {"llama": "llama", "mistral": "llama", "qwen3": "qwen3"}
KIND = "speculators_model_type"
OTHER_KINDS = ("mtp", "dflash", "dspark", "dflash2", "peagle")  # with a layout of their own


class Speculators(Layout):
    """A head with the name of its base."""

    name = "speculators"
    family: ClassVar[type[DraftHeadPreTrainedModel]] = Eagle3ForCausalLM
    targets = ("speculators",)
    holds_vocabulary = True

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        return KIND in config and config[KIND] not in OTHER_KINDS

    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        config = source.config
        if config[KIND] not in ("eagle3", "peagle"):
            raise ValueError(
                f"{source.name!r} holds a speculator of the kind {config[KIND]!r}, which has no family here: expected "
                f"'eagle3', {', '.join(map(repr, OTHER_KINDS))}."
            )
        if "norm_before_residual" not in config and fields.get("norm_before_residual") is None:
            raise ValueError(
                f"{source.name!r} does not say norm_before_residual, which speculators takes for false and vLLM for "
                "true: say which by norm_before_residual=True or norm_before_residual=False (on the command line "
                "--set)."
            )
        if fields.get("feature_layers") is None:
            refuse_without_auxiliary(source)
        ids = config.get(IDS)
        flags = {
            "feature_layers": fields.get("feature_layers") or (list(ids) if ids else None),
            "norm_before_residual": bool(config.get("norm_before_residual")),
            "norm_output": bool(config.get("norm_output")),
        }
        layer = config.get("transformer_layer_config") or {}
        return read_pair_head(self, source, layer, flags, verifier_of(config))

    def write(self, saved: SavedHeads, target: str) -> Files:
        config, layer, text = saved.config, saved.config.own_layer, saved.config.get_text_config()
        if config.fc_bias:
            raise Loss("fc has a bias, and the target builds it without", "train it without fc_bias")
        if layer.model_type not in LAYERS:
            what = f"its layer is that of a {layer.model_type!r} model, and the target builds those of Llama and Qwen3"
            raise Loss(what, "train it with layer_config= of one of these")
        if layer.hidden_size != text.hidden_size:
            what = (
                f"it is {layer.hidden_size} wide and its base {text.hidden_size}, and the target takes them for alike"
            )
            raise Loss(what, "use --to vllm or --to sglang")
        features = features_to_write(saved, "vLLM sorts them")
        tensors, notes = split_tensors(saved, "layers.0.")
        biased = any(key.startswith("layers.") and key.endswith("o_proj.bias") for key in tensors)
        kind, parallel = ("peagle", True) if self.family is PEagleForCausalLM else ("eagle3", False)
        if parallel:
            tensors[MASK_STATES] = tensors[MASK_STATES][None, None]
        about: dict[str, Any] = {
            KIND: kind,
            "speculators_version": VERSION,
            "architectures": ["PEagleSpeculator" if parallel else "Eagle3Speculator"],
            **({"mask_token_id": config.mask_token_id} if parallel else {}),
            "draft_vocab_size": config.draft_vocab_size,
            **{name: getattr(config, name) for name in NORM_FLAGS},
            "target_hidden_size": None,
            IDS: features,
            "tie_word_embeddings": False,
            "dtype": str(saved.tensors["fc.weight"].dtype).removeprefix("torch."),
            "transformer_layer_config": llama_fields(layer, text.vocab_size)
            | {
                "model_type": LAYERS[layer.model_type],
                "num_hidden_layers": config.num_layers,
                "attention_bias": biased,
                "mlp_bias": bool(getattr(layer, "mlp_bias", False)),
            },
            "speculators_config": speculators_config(
                saved, kind, config.num_draft_heads if parallel else min(config.num_draft_heads, SPECULATIVE_TOKENS)
            ),
        }
        if config.window is not None:
            windowed = {"sliding_window": config.window, "layer_types": ["sliding_attention"] * config.num_layers}
            about["transformer_layer_config"] |= windowed
        if not config.own_embeddings:
            notes.append(
                "embeddings are not in the file: vLLM takes the base's; in the speculators library (0.9.0) "
                "fill embed_tokens.weight with NaN before load_verifier_weights(), or they stay uninitialized."
            )
        return Files("model.safetensors", tensors, about, [*notes, "vllm serve FOLDER starts the base with the head."])


class SpeculatorsPEagle(Speculators):
    """A P-EAGLE head of that library."""

    name = "speculators (peagle)"
    family = PEagleForCausalLM

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        return config.get(KIND) == "peagle"

    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        heads = super().read(source, fields)
        proposals = (source.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        if (tokens := proposals[0].get("speculative_tokens")) is not None:
            heads.fields["num_draft_heads"] = tokens
        return heads


def verifier_of(config: Mapping[str, Any]) -> str | None:
    """The base that a config.json names."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return verifier.get("name_or_path")


def speculators_config(saved: SavedHeads, algorithm: str, tokens: int) -> dict[str, Any]:
    """What config.json says of the base, and how many tokens are drafted at a time."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    architectures = saved.config.get_text_config().architectures
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": saved.base, "architectures": list(architectures or [])},
    }
