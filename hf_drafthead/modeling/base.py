"""The drafter contract, and the model that holds a base and its drafter: attach, load, save.

Shapes: B rows, A newly verified positions, T positions, n nodes of a tree level, V vocabulary, H hidden,
F feature layers.
"""

import copy
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from hf_drafthead.generation.mixin import DraftHeadGenerationMixin
from hf_drafthead.modeling import checkpoint
from hf_drafthead.modeling.config import DraftHeadConfig

logger = logging.get_logger(__name__)
Model = TypeVar("Model", bound="DraftHeadPreTrainedModel")

# Arguments of from_pretrained that speak of the heads' own files, and of how any file is fetched.
HEADS_ARGUMENTS = {"revision", "subfolder", "variant", "_from_auto", "_from_pipeline", "adapter_kwargs", "key_mapping"}
HUB_ARGUMENTS = {"cache_dir", "force_download", "local_files_only", "proxies", "token"}
# What a generation config says about drafting: it belongs to the heads; everything else belongs to the base.
DRAFT_SETTINGS = ("draft_tree", "acceptance", "posterior_threshold", "posterior_alpha", "calibration")
PUBLISHED_TREE = "mc_sim_7b_63"


class Drafter(nn.Module):
    """A family's heads, and how they guess.

    `generation` calls `start` once, then in every step `observe` with what was verified and `expand` once per tree
    level; training calls `head_states` and `head_logits`. What a generation needs to remember is in the state that
    these pass on, never on the module.

    Attributes:
        feature_layers: which hidden states of the base are read; -1 is the last one, after the base's final norm.
        keeps_history: True if `observe` needs every verified position, False if only each row's last one counts.
        base: the base model: a plain reference, so that it is neither saved nor moved with the drafter.
    """

    feature_layers: tuple[int, ...] = (-1,)
    keeps_history: bool = False
    base: Any

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def max_depth(self) -> int | None:
        """Deepest tree level that can be guessed; None if there is no limit."""
        return self.config.num_draft_heads

    def attach(self, base: nn.Module) -> None:
        """Read embeddings and lm_head from this base from now on."""
        self.__dict__["base"] = base  # past nn.Module's bookkeeping: not a submodule

    def copy_from_base(self) -> None:
        """Give fresh heads what they start from: weights of the base."""
        raise NotImplementedError

    def start(self, batch_size: int, capacity: int) -> Any:
        """A fresh state.

        Args:
            batch_size: rows.
            capacity: most positions that a row can ever hold.
        """
        raise NotImplementedError

    def observe(self, state: Any, features: Tensor, tokens: Tensor, lengths: Tensor) -> Any:
        """Take in newly verified positions.

        Args:
            state: from `start` or the last `observe` or `expand`.
            features: (B, A, F*H) the base's hidden states there.
            tokens: (B, A) the token that follows each position; the last valid one is the next root.
            lengths: (B,) how many of the A positions are valid, first ones first. A row with 0 stands still.

        Returns:
            The state to go on with.
        """
        raise NotImplementedError

    def expand(self, state: Any, tokens: Tensor, parents: Tensor) -> tuple[Any, Tensor]:
        """Guess the children of the nodes of a tree level; the d-th call since `observe` asks head d.

        Args:
            state: from `observe` or the last `expand`.
            tokens: (B, n) tokens of the nodes; n = 1 and the root on the first call.
            parents: (B, n) where each node hangs: index of its parent among the nodes of the previous call.

        Returns:
            The state to go on with, and logits (B, n, V), or (B, 1, V) if the guess is the same for all nodes.
        """
        raise NotImplementedError

    def head_states(self, features: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        """What each head's output projection is applied to, with the true tokens in the place of guesses.

        Args:
            features: (B, T, F*H).
            input_ids: (B, T) the text itself.
            attention_mask: (B, T) 1 where the text is real.

        Returns:
            One (B, T, H) per head. Entry i at position t guesses token t + 2 + i; where a family reads the tokens
            t + 1 ... t + 1 + i these wrap around at the end of the text, and what is there has no meaning.
        """
        raise NotImplementedError

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        """Logits (..., V) of one head from its state (..., H)."""
        raise NotImplementedError

    def placed(self, tensor: Tensor) -> Tensor:
        """The tensor where the drafter is, and in its dtype."""
        like = next(self.parameters())
        return tensor.to(like.dtype) if like.is_meta else tensor.to(like)  # hooks move what an offloaded drafter needs

    def embed(self, tokens: Tensor, like: Tensor) -> Tensor:
        """The base's input embeddings (..., H) of tokens, where and in the type that `like` has."""
        embedding = self.base.get_input_embeddings()
        weight = embedding.weight
        return embedding(tokens if weight.is_meta else tokens.to(weight.device)).to(like)  # meta: offloaded, as above


class DraftHeadPreTrainedModel(DraftHeadGenerationMixin, PreTrainedModel):
    """A base model and the draft heads that make its `generate` faster.

    `MedusaForCausalLM(config)` builds both from the config with random weights; `from_base` puts fresh heads on an
    existing base; `from_pretrained` loads trained heads and finds their base.

    Attributes:
        base: the causal language model whose text is reproduced.
        drafter: the heads.
    """

    config: DraftHeadConfig
    drafter_class: ClassVar[type[Drafter]]
    # The outer model has no attention of its own: any choice is passed to the base, which knows what it can do.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True

    def __init__(self, config: DraftHeadConfig, build_base: bool = True) -> None:
        if not isinstance(config.base_config, PreTrainedConfig):
            raise ValueError(
                f"{type(config).__name__} has no base_config: give it the config of the base, or use "
                f"{type(self).__name__}.from_base(...)."
            )
        super().__init__(config)
        # The base comes first: device and dtype of the model are those of its first parameter.
        self.register_module("base", None)
        if build_base:
            self.base = AutoModelForCausalLM.from_config(copy.deepcopy(config.base_config))
        self.drafter = self.drafter_class(config)
        self.post_init()
        if build_base:
            self._attach(self.base)
            self.drafter.copy_from_base()

    # ---- attach -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_base(
        cls: type[Model],
        base: str | os.PathLike | nn.Module,
        *,
        config: DraftHeadConfig | None = None,
        base_revision: str | None = None,
        **kwargs: Any,
    ) -> Model:
        """Fresh heads on a base.

        Args:
            base: Hub id or path of a causal language model, or a loaded one (which is used, not copied).
            config: take the family's fields from this config.
            base_revision: branch, tag or commit of the base.
            kwargs: fields of the family's config (`num_draft_heads=4`), before those of `config`; all others go to
                `AutoModelForCausalLM.from_pretrained`.

        Returns:
            The model, on the base's device and in its dtype.

        Raises:
            OSError: there is no such base.
            TypeError: an argument that neither the config nor a loaded base has.
            ValueError: a config field is out of range, or the base has no lm_head.
        """
        own = {field.name for field in fields(cls.config_class)} - {field.name for field in fields(PreTrainedConfig)}
        about_the_base = {"base_config", "base_included", "base_model_name_or_path", "base_model_revision"}
        config_fields = {name: getattr(config, name) for name in own - about_the_base} if config is not None else {}
        config_fields |= {name: kwargs.pop(name) for name in own & set(kwargs)}
        loaded: Any = base
        commit = base_revision
        if isinstance(base, nn.Module):
            _refuse_loading_arguments(base, kwargs)
            name = getattr(loaded.config, "_name_or_path", "") or None
        else:
            name = os.fspath(base)
            hub = {key: kwargs[key] for key in HUB_ARGUMENTS & set(kwargs)} | {"revision": base_revision or "main"}
            checkpoint.base_config_at(name, "new heads", hub, kwargs.get("trust_remote_code") is True)
            commit = checkpoint.commit_of(name, hub)
            loaded = AutoModelForCausalLM.from_pretrained(name, revision=commit or base_revision or "main", **kwargs)
        if loaded.get_output_embeddings() is None:
            raise ValueError(f"{type(loaded).__name__} has no lm_head: draft heads need a causal language model.")
        if name and os.path.isdir(name):
            name = str(Path(name).resolve())
        config_fields = {"base_model_name_or_path": name, "base_model_revision": commit} | config_fields
        model = cls(cls.config_class(base_config=loaded.config, **config_fields), build_base=False)
        model._attach(loaded)
        model.drafter.copy_from_base()
        model.drafter.train(loaded.training)
        model.training = loaded.training
        model._take_generation_config(None)
        model.generation_config.draft_tree = PUBLISHED_TREE
        return model

    def _attach(self, base: Any) -> None:
        """Make `base` this model's base, and put the drafter where the base's last layer is.

        What transformers collects from submodels in `post_init` is carried over by hand: `post_init` would touch the
        weights of a live base.
        """
        self.base = base
        self.drafter.attach(base)
        self.config.base_config = base.config  # after construction, so that both stay one object
        self.config._attn_implementation_internal = getattr(base.config, "_attn_implementation_internal", None)
        tied = getattr(base, "all_tied_weights_keys", None) or {}
        self.all_tied_weights_keys = {f"base.{target}": f"base.{source}" for target, source in tied.items()}
        for name in (
            "_no_split_modules",
            "_skip_keys_device_placement",
            "_keep_in_fp32_modules",
            "_keep_in_fp32_modules_strict",
        ):
            setattr(self, name, set(getattr(self, name) or ()) | set(getattr(base, name, None) or ()))
        device, dtype = _last_layer(base)
        if device.type != "meta":
            self.drafter.to(device=device, dtype=dtype)
        placed = getattr(base, "hf_device_map", None)
        if placed:
            self.hf_device_map = {f"base.{name}" if name else "base": place for name, place in placed.items()}
            self.hf_device_map["drafter"] = device

    def _take_generation_config(self, heads: GenerationConfig | None) -> None:
        """Generate as the base does, with the heads' own settings on top."""
        ours = copy.deepcopy(getattr(self.base, "generation_config", None) or GenerationConfig())
        ours._from_model_config = False  # such a config drops the settings that transformers does not know when loaded
        for name in DRAFT_SETTINGS:
            if heads is not None and getattr(heads, name, None) is not None:
                setattr(ours, name, copy.deepcopy(getattr(heads, name)))
        self.generation_config = ours

    # ---- load -------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls: type[Model],
        pretrained_model_name_or_path: str | os.PathLike,
        *model_args: Any,
        config: DraftHeadConfig | str | os.PathLike | None = None,
        base_model: str | os.PathLike | nn.Module | None = None,
        base_revision: str | None = None,
        generation_config: GenerationConfig | None = None,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Model | tuple[Model, dict[str, Any]]:
        """Load trained heads and their base.

        Args:
            pretrained_model_name_or_path: folder or Hub id of the heads, saved with or without their base.
            config: use this config instead of the checkpoint's.
            base_model: Hub id, path or loaded model to use instead of the base that the config names.
            base_revision: branch, tag or commit of the base; default: the one that the heads were trained on.
            generation_config: use this one instead of the base's with the heads' settings.
            output_loading_info: also return what transformers says about the loading.
            kwargs: `revision`, `subfolder` and `variant` speak of the heads' checkpoint; `cache_dir`,
                `force_download`, `local_files_only`, `proxies` and `token` of every download; all others (`dtype`,
                `device_map`, `quantization_config`, `attn_implementation`, ...) are for the base. The drafter goes to
                the device and dtype of the base's last layer.

        Raises:
            OSError: heads or base are not there, or a file cannot be read.
            ValueError: the checkpoint is of another kind, a tensor is missing, unknown or of another shape, or the
                base is not the one that the heads were made for.
        """
        path = os.fspath(pretrained_model_name_or_path)
        fetch = {key: kwargs.pop(key) for key in HUB_ARGUMENTS & set(kwargs)}
        heads = {key: kwargs.pop(key) for key in HEADS_ARGUMENTS & set(kwargs)}
        hub = fetch | {key: heads[key] for key in ("revision", "subfolder") if heads.get(key) is not None}
        config = cls._read_config(path, config, hub)
        # AutoModel puts the choice of attention into the config; it is meant for the base.
        kwargs.setdefault("attn_implementation", config._attn_implementation)
        if kwargs["attn_implementation"] is None:
            del kwargs["attn_implementation"]
        config._attn_implementation = None
        cls._check_files(path, config, heads.get("variant"), hub)
        heads |= fetch | {"config": config, "use_safetensors": True, "output_loading_info": True}
        if config.base_included:
            if base_model is not None or base_revision is not None:
                raise ValueError(f"{path!r} contains its own base: drop base_model= and base_revision=.")
            if kwargs.get("quantization_config") is not None:
                kwargs["quantization_config"] = cls._sparing_the_drafter(config, kwargs["quantization_config"])
            model, info = super().from_pretrained(path, *model_args, **heads, **kwargs)
            _refuse_damage(path, info)
            if "hf_quantizer" in model.__dict__:  # only the base is quantized: heads are saved as they are
                model.base.hf_quantizer = model.__dict__.pop("hf_quantizer")
            model.base.generation_config = copy.deepcopy(model.generation_config)
            for name in DRAFT_SETTINGS:
                model.base.generation_config.__dict__.pop(name, None)
        else:
            base = cls._load_base(path, config, base_model, base_revision, fetch, kwargs)
            for holder in (config, config.base_config):
                holder.__dict__.pop("quantization_config", None)  # it would quantize the heads
            model, info = super().from_pretrained(
                path, *model_args, build_base=False, dtype=_last_layer(base)[1], **heads
            )
            _refuse_damage(path, info)
            model._attach(base)
            model._take_generation_config(model.generation_config)
        if generation_config is not None:
            model.generation_config = copy.deepcopy(generation_config)
        return (model, info) if output_loading_info else model

    @classmethod
    def _read_config(cls, path: str, given: Any, hub: dict[str, Any]) -> DraftHeadConfig:
        """The checkpoint's config, or a copy of the given one, if it is of this family."""
        family = cls.config_class
        if isinstance(given, PreTrainedConfig):
            found, config = given.model_type, copy.deepcopy(given)
        else:
            source = os.fspath(given) if given is not None else path
            try:
                found_fields, _ = family.get_config_dict(source, **hub)
                if not found_fields:
                    raise OSError("there is no config.json")
            except OSError as error:
                reason = str(error).splitlines()[0]
                raise OSError(
                    f"{source!r} is no draft-head checkpoint ({reason}): give a folder or Hub id that save_pretrained "
                    "of a draft-head model has written."
                ) from error
            found = found_fields.get("model_type")
            config = family.from_dict(found_fields) if found == family.model_type else None
        if found != family.model_type:
            other_family = str(found).startswith("drafthead_")
            advice = "load it with AutoModel" if other_family else "to put new heads on a base use from_base"
            raise ValueError(
                f"{path!r} is no {family.model_type} checkpoint: its config.json has model_type {found!r}; {advice}."
            )
        return config

    @classmethod
    def _blank(cls: type[Model], config: DraftHeadConfig, build_base: bool) -> Model:
        """The model without memory, to look at its names and shapes."""
        with torch.device("meta"):
            return cls(copy.deepcopy(config), build_base=build_base)

    @classmethod
    def _check_files(cls, path: str, config: DraftHeadConfig, variant: str | None, hub: dict[str, Any]) -> None:
        expected = {name: tensor.shape for name, tensor in cls._blank(config, build_base=False).state_dict().items()}
        files = checkpoint.checkpoint_files(path, variant, hub)
        checkpoint.check_tensors(path, files, expected, heads_only=not config.base_included)

    @classmethod
    def _sparing_the_drafter(cls, config: DraftHeadConfig, quantization: Any) -> Any:
        """The quantization config, with the drafter (and, as by default, the lm_head) left as they are."""
        spared = copy.deepcopy(quantization)
        values = spared if isinstance(spared, dict) else vars(spared)
        in_bitsandbytes = {"llm_int8_skip_modules", "load_in_4bit", "load_in_8bit", "_load_in_8bit"} & set(values)
        name = "llm_int8_skip_modules" if in_bitsandbytes else "modules_to_not_convert"
        if values.get(name) is None:
            blank = cls._blank(config, build_base=True)
            head = blank.base.get_output_embeddings()
            values[name] = [name for name, module in blank.named_modules() if module is head]
        values[name] = [*values[name], "drafter"]
        return spared

    @classmethod
    def _load_base(
        cls,
        path: str,
        config: DraftHeadConfig,
        base_model: str | os.PathLike | nn.Module | None,
        base_revision: str | None,
        fetch: dict[str, Any],
        kwargs: dict[str, Any],
    ) -> nn.Module:
        """The base that the heads at `path` run on, checked against what they were trained for."""
        if isinstance(base_model, nn.Module):
            _refuse_loading_arguments(base_model, kwargs)
            name = getattr(base_model.config, "_name_or_path", "")
            checkpoint.check_base(config, base_model.config, name or type(base_model).__name__)
            base = base_model
        else:
            name = checkpoint.locate_base(config, path) if base_model is None else os.fspath(base_model)
            revision = base_revision or (config.base_model_revision if base_model is None else None) or "main"
            hub = fetch | {"revision": revision}
            trusted = kwargs.get("trust_remote_code") is True
            checkpoint.check_base(config, checkpoint.base_config_at(name, path, hub, trusted), name)
            commit = checkpoint.commit_of(name, hub)
            if commit and config.base_model_revision and commit != config.base_model_revision:
                logger.warning_once(
                    f"these heads were trained on {config.base_model_name_or_path!r} at {config.base_model_revision}; "
                    f"the base is {name!r} at {commit}: fewer guesses may be accepted."
                )
            base = AutoModelForCausalLM.from_pretrained(name, revision=commit or revision, **fetch, **kwargs)
        # A Hub id stays as the record of what the heads were trained for; a path is only where the base lies here.
        recorded = config.base_model_name_or_path
        if name and (base_model is None or not recorded or checkpoint.is_local(recorded, path)):
            config.base_model_name_or_path = str(Path(name).resolve()) if os.path.isdir(name) else name
        return base

    # ---- save -------------------------------------------------------------------------------------------------------

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        *,
        include_base: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save the heads, and with `include_base=True` the base's weights too.

        Args:
            save_directory: folder to write to.
            is_main_process: as in transformers.
            state_dict: save these tensors instead of the model's own.
            include_base: a checkpoint that needs no other: for a base that was trained together with its heads.
            kwargs: as in transformers (`max_shard_size`, `variant`, `push_to_hub`, ...).

        Raises:
            ValueError: `include_base=True` with a quantized base.
        """
        quantizer = getattr(self.base, "hf_quantizer", None)
        if include_base and quantizer is not None:
            raise ValueError(
                f"the base is quantized ({quantizer.quantization_config.quant_method}) and cannot be saved with its "
                "heads: save the heads only, or load the base without quantization_config=."
            )
        tensors = self.state_dict() if state_dict is None else state_dict
        if not include_base:
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("drafter.")}
            kwargs["save_original_format"] = False  # renamings of the base's architecture are not for the heads
        self.config.base_included = include_base
        try:
            super().save_pretrained(save_directory, is_main_process=is_main_process, state_dict=tensors, **kwargs)
        finally:
            self.config.base_included = False

    # ---- being a model ----------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """The base's own forward: the heads take no part in it."""
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "labels": labels,
            "use_cache": use_cache,
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
            "return_dict": return_dict,
        }
        if isinstance(logits_to_keep, Tensor) or logits_to_keep:
            given["logits_to_keep"] = logits_to_keep
        # Not every base knows every argument: pass on only what was given.
        return self.base(**{name: value for name, value in given.items() if value is not None}, **kwargs)

    @classmethod
    def can_generate(cls) -> bool:
        """Always."""
        return True

    def get_input_embeddings(self) -> nn.Module:
        return self.base.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.base.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.base.set_output_embeddings(new_embeddings)

    def get_decoder(self) -> nn.Module:
        return self.base.get_decoder()

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Refused unless nothing changes: the heads guess over the vocabulary that they were trained for."""
        embeddings: Any = self.get_input_embeddings()
        size = embeddings.weight.shape[0]
        if pad_to_multiple_of is None and new_num_tokens in (None, size):
            return embeddings
        raise ValueError(
            f"the draft heads guess over {size} tokens and cannot be resized to {new_num_tokens or size} (multiple of "
            f"{pad_to_multiple_of or 1}): resize the base, then train heads for it (from_base)."
        )

    def _init_weights(self, module: nn.Module) -> None:
        # Parameters have their starting values from where they are made; what is left are computed buffers.
        if any(True for _ in module.buffers(recurse=False)):
            super()._init_weights(module)


def _last_layer(base: Any) -> tuple[torch.device, torch.dtype]:
    """Device and compute dtype of the base's lm_head."""
    head = base.get_output_embeddings()
    device = getattr(getattr(head, "_hf_hook", None), "execution_device", None)
    device = head.weight.device if device is None else device
    dtype = head.weight.dtype
    if not dtype.is_floating_point or dtype.itemsize < 2:  # a quantized lm_head
        dtype = base.dtype
    return torch.device(device), dtype


def _refuse_loading_arguments(base: Any, kwargs: dict[str, Any]) -> None:
    """Arguments that only matter while a base is loaded would be ignored silently with a loaded one."""
    harmless: dict[str, tuple[Any, ...]] = {
        "dtype": ("auto", base.dtype, str(base.dtype).removeprefix("torch.")),
        "trust_remote_code": (True, False),
        "attn_implementation": (getattr(base.config, "_attn_implementation", None),),
    }
    harmless["torch_dtype"] = harmless["dtype"]
    for name, value in kwargs.items():
        if value is not None and value not in harmless.get(name, ()):
            raise TypeError(
                f"{name}={value!r} is for loading a base, but the base given is a loaded {type(base).__name__}: "
                "set it when the base is loaded."
            )


def _refuse_damage(path: str, info: dict[str, Any]) -> None:
    """Raise for what transformers only logs."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            raise ValueError(
                f"{path!r} does not fit its config: {kind.replace('_', ' ')} {sorted(map(str, info[kind]))[:3]}: "
                "save the checkpoint again, or correct config.json."
            )
