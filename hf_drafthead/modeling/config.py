"""What every draft-head model is configured by: its base, and how many heads guess ahead of it."""

import copy
import inspect
import os
from dataclasses import fields
from pathlib import Path, PureWindowsPath
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, GenerationConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import CONFIG_NAME

from hf_drafthead.modeling.decoder_layer import has_layers
from hf_drafthead.modeling.files import MAX_NESTING, is_deep, read_json, refusing, shortened
from hf_drafthead.modeling.layers import llama_like
from hf_drafthead.modeling.remote_code import CODE_FILE, NotCopied, code_of, code_references, is_of_the_package

MODEL_TYPE_PREFIX = "drafthead_"  # of every family's model_type
KINDS: dict[Any, str] = {bool: "True or False", bool | None: "True, False or None", str | None: "text, or None"}
BASE_FOLDER = "base"  # of a checkpoint, in which a base lies that is not the named one any more
# A config builds modules before a tensor is looked at: these keep what it can cost far above anything published.
MAX_HEADS = 64
MAX_LAYERS = 32  # of one head
# Configs of transformers make lists of these lengths as soon as they are created; the fields end in ...
MAX_COUNTS = {"layer": 1024, "layers": 1024, "labels": 2**16}
# What a file may not choose: which code computes attention and experts. A quantized base says that itself.
IMPLEMENTATIONS = {"attn_implementation", "experts_implementation"}
IMPLEMENTATIONS |= {f"_{name}" for name in IMPLEMENTATIONS} | {f"_{name}_internal" for name in IMPLEMENTATIONS}
IMPLEMENTATIONS |= {"quantization_config"}

CLASS_FIELDS = {"attribute_map", "sub_configs"}  # of a config's class, never of a file
# What code that is given any model's config asks of it: the base's text config answers, and holds what is set.
OF_THE_BASE = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"}
OF_THE_BASE |= {"num_attention_heads", "num_key_value_heads", "head_dim", "use_cache"}
OF_THE_BASE |= {"bos_token_id", "eos_token_id", "pad_token_id"}


class DraftHeadConfig(NotCopied, PreTrainedConfig):
    """The fields that all families share; a family's config adds its own.

    Args:
        base_config: config of the base model, as a config or as its dict. It is copied: a config object that a live
            model holds is never changed.
        base_model_name_or_path: where the base is loaded from when a checkpoint holds the heads only. A relative path
            is looked up in the checkpoint's own folder.
        base_model_revision: commit of the base that the heads were trained on, if the base came from the Hub.
        base_gguf_file: name of the GGUF file in that place that holds the base; None for safetensors.
        base_subfolder: folder inside that place.
        base_included: True in a checkpoint whose base is not the named one any more, and lies in its folder `base`.
        base_origin: Hub id of the base that such a base was made from.
        base_adapters: names of PEFT adapters of the base, each in a folder `base/NAME` of the checkpoint, and whether
            it takes part in what the base computes.
        base_quantization: how the named base is quantized when it is loaded, as in a `quantization_config`.
        adapter_name_or_path, adapter_revision: in checkpoints of earlier releases, the one adapter of the base: a
            folder of the checkpoint, or a Hub id and commit.
        last_hidden_size: width of the base's embeddings and of what its lm_head reads, where that is not the base's
            hidden_size (512 of 1024 in facebook/opt-350m): of these the heads read and make states.
        num_draft_heads: tokens guessed ahead of the base's own next token.
        draft_vocab_size: D, tokens among which the heads choose, the most frequent ones of the training text (FR-Spec,
            arXiv 2502.14856); None for all of the base's.

    Raises:
        ValueError: a field is out of range, or two of them contradict each other.
    """

    model_type = "drafthead"
    sub_configs: ClassVar = {"base_config": AutoConfig}  # and the others that a family has
    any_depth: ClassVar[bool] = False  # guesses go on from guesses, as deep as a tree is

    base_config: dict[str, Any] | PreTrainedConfig | None = None
    base_model_name_or_path: str | None = None
    base_model_revision: str | None = None
    base_gguf_file: str | None = None
    adapter_name_or_path: str | None = None
    adapter_revision: str | None = None
    base_included: bool = False
    base_subfolder: str | None = None
    base_origin: str | None = None
    base_adapters: dict[str, bool] | None = None
    base_quantization: dict[str, Any] | None = None
    last_hidden_size: int | None = None
    num_draft_heads: int = 4
    draft_vocab_size: int | None = None

    def __init_subclass__(cls, *args: Any, **kwargs: Any) -> None:
        names = ("base_config", "layer_config", "draft_config")
        of_family = {name: AutoConfig for name in names if hasattr(cls, name)}
        cls.sub_configs = {**of_family, **vars(cls).get("sub_configs", {})}
        super().__init_subclass__(*args, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        # The parent's __post_init__ resets the attention implementation of sub-configs in place, which would turn a
        # live base non-causal: only ever hand it a copy.
        for name in self.sub_configs:
            setattr(self, name, sub_config(name, getattr(self, name)))
        with refusing(ValueError, "the config has a field that cannot be used", "correct it."):
            super().__post_init__(**kwargs)
        if is_of_the_package(type(self)):
            self.auto_map = code_references(type(self))  # whatever a file says
        self.check()

    def check(self) -> None:
        """Refuse values that cannot be built; families extend it."""
        self._check_count("num_draft_heads", 1, MAX_HEADS)
        own_fields = self.own_fields()
        if "num_layers" in own_fields:
            self._check_count("num_layers", 1, MAX_LAYERS)
        for field in fields(self):
            value, kind = getattr(self, field.name), field.type
            if field.name in own_fields and kind in KINDS and not isinstance(value, kind):  # type: ignore
                raise ValueError(f"{field.name} is {shortened.repr(value)}: expected {KINDS[kind]}.")
        if not (self.dtype is None or isinstance(self.dtype, torch.dtype)):
            raise ValueError(f"dtype is {shortened.repr(self.dtype)}: expected the name of one, such as bfloat16.")
        if self.last_hidden_size is not None:
            self._check_count("last_hidden_size", 1)
        if self.base_adapters is not None:
            names = self.base_adapters if isinstance(self.base_adapters, dict) else {"": None}
            if not all(name and PureWindowsPath(name).name == name and type(on) is bool for name, on in names.items()):
                raise ValueError(
                    f"base_adapters is {shortened.repr(self.base_adapters)}: expected names of folders, with true or "
                    "false."
                )
        if isinstance(self.base_config, DraftHeadConfig):
            raise ValueError(
                f"base_config is of a model with draft heads itself ({self.base_config.model_type!r}): give the config "
                "of the model that these heads are for."
            )
        if isinstance(self.base_config, PreTrainedConfig):
            text = self.get_text_config()
            for name in ("hidden_size", "vocab_size"):
                value = getattr(text, name, None)
                if type(value) is not int or value < 1:
                    raise ValueError(
                        f"base_config has {name} {shortened.repr(value)}: expected a whole number of at least 1."
                    )
        if self.draft_vocab_size is not None:
            self._check_count("draft_vocab_size", 1)
            known_tokens = self.known_tokens
            if known_tokens is not None and self.draft_vocab_size > known_tokens:
                raise ValueError(
                    f"draft_vocab_size is {self.draft_vocab_size}, but the base has {known_tokens} tokens: give as "
                    "many at most, or leave it out."
                )

    @property
    def known_tokens(self) -> int | None:
        """V, tokens that the heads could choose among; None while there is no base."""
        return self.get_text_config().vocab_size if isinstance(self.base_config, PreTrainedConfig) else None

    @property
    def wants_fewer_tokens(self) -> bool:
        """Whether training lets the heads choose among some tokens even by the recipe of the paper."""
        return False

    @property
    def family(self) -> str:
        """The family's short name, as the papers name it: `medusa`, `hydra`, `hydra++`, `amphista`, ..."""
        return self.model_type.removeprefix(MODEL_TYPE_PREFIX).replace("_", "-")

    @property
    def width(self) -> int:
        """H, of the states that heads read and make."""
        return self.last_hidden_size or self.get_text_config().hidden_size

    @property
    def max_depth(self) -> int | None:
        """Deepest level of a draft tree that the heads can guess; None if there is no limit."""
        return None if self.any_depth else self.num_draft_heads

    @classmethod
    def own_fields(cls) -> set[str]:
        """Names of the fields that not every config of transformers has."""
        return {field.name for field in fields(cls)} - {field.name for field in fields(PreTrainedConfig)}

    @classmethod
    def heads_fields(cls) -> set[str]:
        """Names of the fields that describe the heads, without those about the base and those of every config."""
        return {name for name in cls.own_fields() if not name.startswith(("base_", "adapter_", "last_hidden_size"))}

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """The base's text config; this config itself while there is no base."""
        if not isinstance(self.base_config, PreTrainedConfig):
            return self
        return self.base_config.get_text_config(decoder=decoder, encoder=encoder)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; another kind of model and values that no config can be made of are refused."""
        model_type = config_dict.get("model_type")
        if model_type not in (None, cls.model_type):
            raise ValueError(
                f"the config has model_type {model_type!r}, expected {cls.model_type!r}: read it with AutoConfig."
            )
        checked = {field.name for field in fields(cls)} - {"base_config"}  # by `check`
        _refuse_costly("the config", {name: value for name, value in config_dict.items() if name not in checked})
        _refuse_shadowing("the config", cls, config_dict)
        kept_fields = {name: value for name, value in config_dict.items() if name not in IMPLEMENTATIONS | OF_THE_BASE}
        # of the validation that transformers' configs have
        with refusing(ValueError, "the config has a field that cannot be used", "correct it.", but=ValueError):
            return super().from_dict(kept_fields, **kwargs)

    @classmethod
    def _dict_from_json_file(cls, json_file: str | os.PathLike) -> Any:
        read_json(json_file)  # within limits, or refused
        return super()._dict_from_json_file(json_file)

    @property
    def own_layer(self) -> PreTrainedConfig:
        """Of which model the decoder layers of the heads are; for families that have some."""
        return getattr(self, "layer_config", None) or self.get_text_config()

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Write `config.json`; a model that lies beside the checkpoint is written as a relative path."""
        saved = copy.deepcopy(self)
        saved.base_model_name_or_path = portable(saved.base_model_name_or_path, save_directory)
        super(DraftHeadConfig, saved).save_pretrained(save_directory, **kwargs)

    def to_json_file(self, json_file_path: str | os.PathLike, use_diff: bool = True) -> None:
        """As in transformers; beside a `config.json` goes the file that its `auto_map` names."""
        path = Path(json_file_path)
        if path.name == CONFIG_NAME and is_of_the_package(type(self)):
            path.with_name(CODE_FILE).write_text(code_of(type(self)), encoding="utf-8")
        super().to_json_file(json_file_path, use_diff=use_diff)

    def to_diff_dict(self) -> dict[str, Any]:
        """What `config.json` holds: without local paths in it, and without the quantization of a base, which says that
        itself where it lies."""
        fields = super().to_diff_dict()
        if (fields.get("draft_model_name_or_path") or "").startswith((os.sep, os.curdir)):
            del fields["draft_model_name_or_path"]
        for name in self.sub_configs:
            (fields.get(name) or {}).pop("_name_or_path", None)
        for holder in (fields, fields.get("base_config") or {}):
            holder.pop("quantization_config", None)
        return fields

    def _check_count(self, name: str, least: int, most: int | None = None) -> None:
        """That a field is a whole number; of modules, each of which takes time and memory, there is a most."""
        value = getattr(self, name)
        if type(value) is not int or value < least or (most is not None and value > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"{name} is {shortened.repr(value)}: expected a whole number {limits}.")

    def _check_single_head(self, whose: str) -> None:
        """Of families that guess at every depth with one head, whose name the message begins with."""
        if self.num_draft_heads != 1:
            raise ValueError(
                f"num_draft_heads is {self.num_draft_heads}, but {whose} at every depth: leave it out, the tree says "
                "how deep to guess."
            )

    def _check_layer(self, asking: str, wanted: bool, same_width: bool = True) -> None:
        """Refuse decoder layers for the heads that cannot be, or that the fields that a message calls `asking` do not
        want; the default for a base that has none is a LLaMA layer."""
        layer_config, layer = getattr(self, "layer_config", None), self.own_layer
        if layer_config is not None and not layer_config.model_type:
            raise ValueError("layer_config has no model_type: give the config of a model, such as a LlamaConfig.")
        if not wanted:
            if layer_config is not None:
                raise ValueError(
                    f"layer_config is of a {layer_config.model_type!r} model, but {asking}: there is no layer to build "
                    "from it, leave it out or ask for one."
                )
            return
        if not isinstance(self.base_config, PreTrainedConfig):
            return
        if not getattr(layer, "num_attention_heads", None):
            raise ValueError(
                f"{asking}, but a {layer.model_type!r} model has no attention heads to build a decoder layer of: give "
                "layer_config= of a model that has, or use Medusa or Hydra heads."
            )
        if layer_config is None:
            if layer.hidden_size != self.width or not has_layers(layer):  # of learned positions, for instance
                self.layer_config = llama_like(layer, layers=1, width=self.width)
            return
        if same_width and getattr(layer_config, "hidden_size", None) != self.width:
            raise ValueError(
                f"layer_config has hidden size {getattr(layer_config, 'hidden_size', None)}, but the base has "
                f"{self.width}: give the layer the base's."
            )
        heads, groups = layer_config.num_attention_heads, getattr(layer_config, "num_key_value_heads", None)
        if groups and heads % groups:
            raise ValueError(
                f"layer_config has num_attention_heads {heads}, but num_key_value_heads {groups}: the first must be a "
                "multiple of the second."
            )

    def _check_mask_token(self) -> None:
        """The token whose embedding stands where none is known, by default the last; refused if the base lacks it."""
        tokens, token = self.known_tokens or 1, getattr(self, "mask_token_id", None)
        token = tokens - 1 if token is None and self.known_tokens else token
        if token is not None and (type(token) is not int or not 0 <= token < tokens):
            raise ValueError(
                f"mask_token_id is {shortened.repr(token)}, but the base embeds {tokens} tokens, numbered from 0: give "
                "one of them, best one that no text has."
            )
        self.mask_token_id = token

    def _check_layer_width(self) -> None:
        """Refuse decoder layers of another width than the base where the heads share its embeddings or lm_head."""
        width = getattr(getattr(self, "layer_config", None), "hidden_size", None)
        if width == self.width:
            return
        if getattr(self, "share_lm_head", False):
            raise ValueError(
                f"layer_config has hidden size {width}, but the base's lm_head reads {self.width}: set "
                "share_lm_head=False, or give the layer the base's size."
            )
        if not getattr(self, "own_embeddings", False):
            raise ValueError(
                f"layer_config has hidden size {width}, but the base's embeddings have {self.width}: set "
                "own_embeddings=True, or give the layer the base's size."
            )

    def _checked_features(self, reader: str, published: list[int], layers: int) -> list[int]:
        """The feature layers, those published where none are given; refused if the base of so many layers lacks one."""
        features = getattr(self, "feature_layers", None)
        if features is None:
            return published
        if not isinstance(features, (list, tuple)) or not features or not all(type(layer) is int for layer in features):
            raise ValueError(f"feature_layers is {features!r}: expected a list of layer numbers, such as [2, 16, 29].")
        if not all(0 <= layer < layers for layer in features):
            raise ValueError(
                f"feature_layers is {list(features)}, but the base has {layers} layers: {reader} reads their "
                f"inputs, numbered from 0 (embeddings) to {layers - 1}."
            )
        if len(set(features)) < len(features):
            raise ValueError(f"feature_layers is {list(features)}: name every layer once.")
        return list(features)


class HeadsGenerationConfig(GenerationConfig):
    """A base's generation config with the settings of its heads.

    Many published bases have a `temperature` or `top_p` without `do_sample`. transformers warns of that when a config
    is saved as it was loaded, and raises when a field was added to it, as heads do.
    """

    @classmethod
    def of(cls, config: GenerationConfig | None) -> "HeadsGenerationConfig":
        """A copy of a config; None for the defaults."""
        ours = cls()
        ours.__dict__.update(copy.deepcopy(vars(config)) if config is not None else {})
        return ours

    @classmethod
    def from_model_config(cls, model_config: Any) -> "HeadsGenerationConfig":
        """The defaults: what a model with heads generates by is its base's own generation config."""
        return cls()

    def validate(self, strict: bool = False, **kwargs: Any) -> None:
        """As in transformers for a config that was not changed: contradictions are warned of, errors raised."""
        super().validate(**kwargs)


def _of_the_base(name: str) -> property:
    def text_config(config: DraftHeadConfig) -> PreTrainedConfig:
        base = vars(config).get("base_config")
        if not isinstance(base, PreTrainedConfig):
            raise AttributeError(f"{name} is the base's, and {type(config).__name__} has no base_config.")
        return base.get_text_config()

    return property(
        lambda config: getattr(text_config(config), name),
        lambda config, value: setattr(text_config(config), name, value),
        doc=f"The base's `{name}`.",
    )


for _name in OF_THE_BASE:
    setattr(DraftHeadConfig, _name, _of_the_base(_name))


def sub_config(name: str, given: Any) -> Any:
    """The config of a model from a config or its dict, without running code of its own; None from None."""
    if given is None or isinstance(given, PreTrainedConfig):
        return copy.deepcopy(given)
    if not isinstance(given, dict):
        raise ValueError(f"{name} is {type(given).__name__}: expected the config of a model, or its dict.")
    _refuse_costly(name, given)
    fields = {key: value for key, value in given.items() if key not in IMPLEMENTATIONS}
    model_type = fields.pop("model_type", None)
    # A base that lives in remote code: keep what its config says until the base itself brings the real class.
    in_transformers = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    config_class = CONFIG_MAPPING[model_type] if in_transformers else PreTrainedConfig
    _refuse_shadowing(name, config_class, fields)
    kind = f"a {shortened.repr(model_type)} model" if in_transformers else "a model"
    with refusing(ValueError, f"{name} is no config of {kind}", "correct it."):  # each checks its fields in its own way
        # transformers' own from_dict writes the config into a message that is rarely read, which costs as much again
        own = inspect.getattr_static(config_class, "from_dict") is not vars(PreTrainedConfig)["from_dict"]
        config = config_class.from_dict(fields) if own else config_class(**fields)
    if not in_transformers:
        config.model_type = model_type
    return config


def _refuse_costly(name: str, fields: dict[str, Any]) -> None:
    """Refuse deep nesting, and numbers for which transformers would make lists of that length, in all sub-configs."""
    if is_deep(fields):
        raise ValueError(f"{name} has fields that are nested more than {MAX_NESTING} levels deep: correct it.")
    for key, value in fields.items():
        if isinstance(value, dict):
            _refuse_costly(name, value)
        elif isinstance(value, (int, float)) and value > (most := MAX_COUNTS.get(key.rpartition("_")[2], value)):
            raise ValueError(f"{name} has {key} {shortened.repr(value)}: expected at most {most}.")


def _refuse_shadowing(name: str, config_class: type[PreTrainedConfig], fields: dict[str, Any]) -> None:
    """Refuse fields that would hide what the code of a config is made of."""
    for key in fields:
        member = inspect.getattr_static(config_class, key, None)
        read_only = isinstance(member, property) and member.fset is None
        if (
            read_only
            or callable(member)
            or isinstance(member, classmethod)
            or key.startswith("__")
            or key in CLASS_FIELDS
        ):
            raise ValueError(f"{name} has the field {shortened.repr(key)}, a name that its own code uses: remove it.")


def portable(name: str | None, save_directory: str | os.PathLike) -> str | None:
    """The path of a base from the checkpoint's folder if both lie in the same folder; else the name as it is."""
    if not name or not os.path.isabs(name):
        return name
    beside = Path(save_directory).resolve().parent
    resolved = Path(name).resolve()
    return os.path.relpath(resolved, beside / "checkpoint") if resolved.is_relative_to(beside) else name
