"""What every draft-head model is configured by: its base, and how many heads guess ahead of it."""

import copy
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MODEL_TYPE_PREFIX = "drafthead_"  # of every family's model_type
ABOUT_THE_BASE = {"base_config", "base_included", "base_model_name_or_path", "base_model_revision"}
ABOUT_THE_BASE |= {"adapter_name_or_path", "adapter_revision"}


def _of_the_base(name: str) -> Any:
    """A field that this config answers for its base, as a config of one model would; set here, it is set there."""

    def get(config: "DraftHeadConfig") -> Any:
        return getattr(config._base_text_config(name), name)

    def put(config: "DraftHeadConfig", value: Any) -> None:
        setattr(config._base_text_config(name), name, value)

    return property(get, put, doc=f"The base's `{name}`.")


class DraftHeadConfig(PreTrainedConfig):
    """The fields that all families share; a family's config adds its own.

    Args:
        base_config: config of the base model, as a config or as its dict. It is copied: a config object that a live
            model holds is never changed.
        base_model_name_or_path: where the base is loaded from when a checkpoint holds the heads only. A relative path
            is looked up in the checkpoint's own folder.
        base_model_revision: commit of the base that the heads were trained on, if the base came from the Hub.
        adapter_name_or_path: the PEFT adapter that the base had when the heads were trained: `adapter`, the folder of
            the checkpoint that holds it, or the Hub id that it came from, which is used if there is no such folder.
        adapter_revision: commit of the adapter, if it came from the Hub.
        base_included: True in a checkpoint that holds the base's weights as well.
        num_draft_heads: tokens guessed ahead of the base's own next token.

    Raises:
        ValueError: a field is out of range, or two of them contradict each other.
    """

    model_type = "drafthead"
    sub_configs: ClassVar = {"base_config": AutoConfig}

    base_config: dict[str, Any] | PreTrainedConfig | None = None
    base_model_name_or_path: str | None = None
    base_model_revision: str | None = None
    adapter_name_or_path: str | None = None
    adapter_revision: str | None = None
    base_included: bool = False
    num_draft_heads: int = 4

    # What code that is given any model's config asks of it.
    vocab_size = _of_the_base("vocab_size")
    hidden_size = _of_the_base("hidden_size")
    intermediate_size = _of_the_base("intermediate_size")
    num_hidden_layers = _of_the_base("num_hidden_layers")
    num_attention_heads = _of_the_base("num_attention_heads")
    num_key_value_heads = _of_the_base("num_key_value_heads")
    head_dim = _of_the_base("head_dim")
    max_position_embeddings = _of_the_base("max_position_embeddings")
    bos_token_id = _of_the_base("bos_token_id")
    eos_token_id = _of_the_base("eos_token_id")
    pad_token_id = _of_the_base("pad_token_id")
    use_cache = _of_the_base("use_cache")

    def __post_init__(self, **kwargs: Any) -> None:
        # The parent's __post_init__ resets the attention implementation of sub-configs in place, which would turn a
        # live base non-causal: only ever hand it a copy.
        for name in self.sub_configs:
            setattr(self, name, _sub_config(name, getattr(self, name)))
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Refuse values that cannot be built; families extend it."""
        self._check_at_least("num_draft_heads", 1)

    @property
    def family(self) -> str:
        """The family's short name, as the papers name it: `medusa`, `hydra`, `hydra++`, `amphista`, ..."""
        return self.model_type.removeprefix(MODEL_TYPE_PREFIX)

    @property
    def max_depth(self) -> int | None:
        """Deepest level of a draft tree that the heads can guess; None if there is no limit."""
        return self.num_draft_heads

    @classmethod
    def heads_fields(cls) -> set[str]:
        """Names of the fields that describe the heads, without those about the base and those of every config."""
        return (
            {field.name for field in fields(cls)} - {field.name for field in fields(PreTrainedConfig)} - ABOUT_THE_BASE
        )

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """The base's text config; this config itself while there is no base."""
        if not isinstance(self.base_config, PreTrainedConfig):
            return self
        return self.base_config.get_text_config(decoder=decoder, encoder=encoder)

    def _base_text_config(self, asked: str) -> PreTrainedConfig:
        base = vars(self).get("base_config")
        if not isinstance(base, PreTrainedConfig):
            raise AttributeError(f"{asked} is the base's, and {type(self).__name__} has no base_config.")
        return base.get_text_config()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, which would only log that the dict is another kind of model's.

        Raises:
            ValueError: it is.
        """
        found = config_dict.get("model_type")
        if found not in (None, cls.model_type):
            raise ValueError(
                f"the config has model_type {found!r}, expected {cls.model_type!r}: read it with AutoConfig."
            )
        return super().from_dict(config_dict, **kwargs)

    @property
    def own_layer(self) -> PreTrainedConfig:
        """Of which model the decoder layers of the heads are; for families that have some."""
        return getattr(self, "layer_config", None) or self.get_text_config()

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write `config.json`; a base that lies beside the checkpoint is written as a relative path."""
        saved = copy.deepcopy(self)
        saved.base_model_name_or_path = _portable(self.base_model_name_or_path, save_directory)
        super(DraftHeadConfig, saved).save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """What `config.json` holds: without the base's local path, and without its quantization unless it is included.

        In a heads-only checkpoint a quantization config would speak of a base that is not there.
        """
        fields = super().to_diff_dict()
        base = fields.get("base_config") or {}
        base.pop("_name_or_path", None)
        if not self.base_included:
            for holder in (fields, base):
                holder.pop("quantization_config", None)
        return fields

    def _check_at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} is {value!r}: expected a whole number of at least {least}.")

    def _check_flag(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}: expected True or False.")

    def _check_layer(self, asking: str, wanted: bool, same_width: bool = True) -> None:
        """Refuse decoder layers for the heads that cannot be.

        Args:
            asking: which fields ask for such layers, with their values, as the message is to say it.
            wanted: whether they do.
            same_width: whether they must be as wide as the base.
        """
        own, layer, text = getattr(self, "layer_config", None), self.own_layer, self.get_text_config()
        if own is not None and not own.model_type:
            raise ValueError("layer_config has no model_type: give the config of a model, such as a LlamaConfig.")
        if not wanted:
            if own is not None:
                raise ValueError(
                    f"layer_config is of a {own.model_type!r} model, but {asking}: there is no layer to build from it, "
                    "leave it out or ask for one."
                )
            return
        if not isinstance(self.base_config, PreTrainedConfig):
            return
        if not getattr(layer, "num_attention_heads", None):
            raise ValueError(
                f"{asking}, but a {layer.model_type!r} model has no attention heads to build a decoder layer of: give "
                "layer_config= of a model that has, or use Medusa or Hydra heads."
            )
        if own is None:
            return
        if same_width and getattr(own, "hidden_size", None) != text.hidden_size:
            raise ValueError(
                f"layer_config has hidden size {getattr(own, 'hidden_size', None)}, but the base has "
                f"{text.hidden_size}: give the layer the base's."
            )
        heads, groups = own.num_attention_heads, getattr(own, "num_key_value_heads", None)
        if groups and heads % groups:
            raise ValueError(
                f"layer_config has num_attention_heads {heads}, but num_key_value_heads {groups}: the first must be a "
                "multiple of the second."
            )

    def _check_fraction(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
            raise ValueError(f"{name} is {value!r}: expected a number from 0 up to, but not including, 1.")


def _sub_config(name: str, given: dict[str, Any] | PreTrainedConfig | None) -> PreTrainedConfig | None:
    if given is None or isinstance(given, PreTrainedConfig):
        return copy.deepcopy(given)
    if not isinstance(given, dict):
        raise ValueError(f"{name} is {type(given).__name__}: expected the config of a model, or its dict.")
    fields = dict(given)
    model_type = fields.pop("model_type", None)
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type](**fields)
    # A base that lives in remote code: keep what its config says until the base itself brings the real class.
    config = PreTrainedConfig(**fields)
    config.model_type = model_type
    return config


def _portable(name: str | None, save_directory: str | os.PathLike) -> str | None:
    """The path of a base from the checkpoint's folder if both lie in the same folder; else the name as it is."""
    if not name or not os.path.isabs(name):
        return name
    beside = Path(save_directory).resolve().parent
    resolved = Path(name).resolve()
    return os.path.relpath(resolved, beside / "checkpoint") if resolved.is_relative_to(beside) else name
