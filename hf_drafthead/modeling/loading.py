"""How a model with draft heads is made: from a config, on a base, or from a checkpoint."""

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.utils import logging

from hf_drafthead.bases.releases import keep_picklable
from hf_drafthead.generation.mixin import DraftHeadGenerationMixin
from hf_drafthead.generation.settings import DEFAULT_TREE, DraftSettings
from hf_drafthead.generation.tree import LOOKUP
from hf_drafthead.modeling.adapters import active_adapter, adapt, find_adapter, unwrapped
from hf_drafthead.modeling.base_model import (
    auto_class,
    full_name,
    last_layer,
    load_base,
    load_named,
    refuse_loading_arguments,
    refuse_misspelt,
    refuse_unfit,
    width_of,
)
from hf_drafthead.modeling.checkpoint import (
    check_tensors,
    read_generation_settings,
    read_heads_config,
    read_tensors,
    refuse_damage,
)
from hf_drafthead.modeling.config import ABOUT_THE_BASE, DraftHeadConfig, HeadsGenerationConfig
from hf_drafthead.modeling.drafter import Drafter
from hf_drafthead.modeling.files import in_one_line, shortened

logger = logging.get_logger(__name__)

LoadedModel = TypeVar("LoadedModel", bound="LoadableModel")

# Arguments of from_pretrained for the heads' own files, and for every download.
HEADS_ARGUMENTS = {"revision", "subfolder", "variant", "_from_auto", "_from_pipeline", "adapter_kwargs"}
LARGE_PROJECTIONS = 1 << 24  # parameters from which heads' own projections may be shared instead
FOUND_BY_CALLS = {"_readers"}  # attributes
HUB_ARGUMENTS = {"cache_dir", "force_download", "local_files_only", "proxies", "token"}


@dataclass(frozen=True)
class HeadsSource:
    """Where heads and their base are read from.

    given: folder or Hub id, None where their tensors are given; fetch: arguments of every download; heads: arguments
    for the heads' own files; base, base_revision, use_safetensors: see `from_pretrained`; arguments: others for the
    base.
    """

    given: str | None
    fetch: dict[str, Any]
    heads: dict[str, Any]
    base: str | os.PathLike | nn.Module | None
    base_revision: str | None
    use_safetensors: bool | None
    arguments: dict[str, Any]

    @property
    def path(self) -> str:
        """The name of the heads in messages."""
        return self.given or "state_dict"

    @property
    def hub(self) -> dict[str, Any]:
        """How their files are fetched."""
        options = {key: self.heads[key] for key in ("revision", "subfolder") if self.heads.get(key) is not None}
        return self.fetch | options

    @property
    def place(self) -> str:
        """The folder to which a relative path of the base refers, or their Hub id."""
        if self.given is None:
            return os.curdir
        inside = self.heads.get("subfolder")
        return os.path.join(self.given, inside) if inside and os.path.isdir(self.given) else self.given

    def adapter(self, beside: bool = True) -> tuple[str | None, dict[str, Any]]:
        """Where an adapter of the whole model lies, heads and base, and arguments for loading it; None without one.

        Args:
            beside: whether one is looked for beside the heads if the user names none.

        Raises:
            OSError: it cannot be read, or is no safetensors file.
        """
        arguments = dict(self.heads.get("adapter_kwargs") or {})
        place = arguments.pop("_adapter_model_path", None) or (self.given if beside else None)
        has_adapter = place is not None and find_adapter(place, self.hub) is not None
        return (place if has_adapter else None), arguments

    def for_the_base(self, config: DraftHeadConfig) -> dict[str, Any]:
        """Arguments for loading the base, with the user's choice of attention and experts, which AutoModel puts into
        the config of the heads; these take the name of their place."""
        chosen = {} if self.use_safetensors is None else {"use_safetensors": self.use_safetensors}
        for name in ("attn_implementation", "experts_implementation"):
            if (choice := getattr(config, f"_{name}")) is not None:
                chosen[name] = choice
            setattr(config, f"_{name}", None)
        config.name_or_path = self.given or ""
        return {**chosen, **self.arguments}


class LoadableModel(DraftHeadGenerationMixin, PreTrainedModel):
    """A base and a drafter in one model, and the ways to make it; `modeling.base` has what it does."""

    config: DraftHeadConfig
    drafter_class: ClassVar[type[Drafter]]
    checkpoint_revision: str | None = None

    def __init__(self, config: DraftHeadConfig, build_base: bool = True) -> None:
        if not isinstance(config.base_config, PreTrainedConfig):
            raise ValueError(
                f"{type(config).__name__} has no base_config: give it the config of the base, or use "
                f"{type(self).__name__}.from_base(...)."
            )
        self._refuse_other_family(config)
        super().__init__(config)
        # The base comes first: device and dtype of the model are those of its first parameter.
        self.register_module("base", None)
        if build_base:
            if (kind := auto_class(config.base_config)) is None:
                raise ValueError(
                    f"base_config is of a {shortened.repr(config.base_config.model_type)} model, which is no causal "
                    "language model of transformers: a base with code of its own is loaded apart, with base_model=."
                )
            base_config = copy.deepcopy(config.base_config)
            self.base = kind.from_config(base_config, trust_remote_code=False)
            config.last_hidden_size = width_of(self.base)
        self.drafter = self.drafter_class(config)
        self.post_init()
        if build_base:
            self._attach(self.base)
            self.drafter.copy_from_base()

    @classmethod
    def from_base(
        cls: type[LoadedModel],
        base: str | os.PathLike | nn.Module,
        *,
        config: DraftHeadConfig | None = None,
        base_revision: str | None = None,
        **kwargs: Any,
    ) -> LoadedModel:
        """Fresh heads on a base.

        Args:
            base: Hub id or path of a causal language model or of an adapter for one, or a loaded model, which may have
                adapters and is used, not copied. A path or id may end with the name of a GGUF file, or `gguf_file=`
                names it. The base's parameters are frozen: what trains the model trains the heads.
            config: take the family's fields from this config.
            base_revision: branch, tag or commit of the base.
            kwargs: fields of the family's config (`num_draft_heads=4`), before those of `config`; all others go to
                `AutoModelForCausalLM.from_pretrained`. `share_lm_head=None`, as without a config, lets heads share the
                base's lm_head where projections of their own would be large and exceed a third of the base.

        Returns:
            The model, on the base's device and in its dtype.

        Raises:
            OSError: there is no such base.
            TypeError: an argument that neither the config nor a loaded base has.
            ValueError: a config field is out of range, or the base is no decoder-only language model, or has draft
                heads already.
        """
        if config is not None:
            cls._refuse_other_family(config)
        family_fields = cls.config_class.heads_fields()
        config_fields = {name: getattr(config, name) for name in family_fields} if config is not None else {}
        config_fields |= {name: kwargs.pop(name) for name in (family_fields | ABOUT_THE_BASE) & set(kwargs)}
        loaded: Any = base
        origin: dict[str, Any]
        if isinstance(base, nn.Module):
            loaded = unwrapped(base)
            refuse_unfit(loaded.config, type(base).__name__, loaded=True)
            refuse_misspelt(kwargs, family_fields)
            refuse_loading_arguments(loaded, kwargs)
            name = getattr(loaded.config, "_name_or_path", "")
            origin = {"base_model_name_or_path": full_name(name) if name else None}
            origin["base_model_revision"] = base_revision
        else:
            hub = {key: kwargs.pop(key) for key in HUB_ARGUMENTS & set(kwargs)} | {"revision": base_revision or "main"}
            loaded, origin = load_named(os.fspath(base), hub, kwargs, fields=family_fields)
        if loaded.get_output_embeddings() is None:
            raise ValueError(f"{type(loaded).__name__} has no lm_head: draft heads need a causal language model.")
        origin["last_hidden_size"] = width_of(loaded)
        by_size = (  # of families that do not share it anyway
            getattr(cls.config_class, "share_lm_head", None) is False
            and config_fields.get("share_lm_head", None if config is None else False) is None
        )
        if by_size:
            config_fields["share_lm_head"] = False
        heads_config = cls.config_class(base_config=loaded.config, **origin | config_fields)
        if by_size:
            cls._share_large_projections(heads_config, loaded)
        model = cls(heads_config, build_base=False)
        model._attach(loaded)
        if (width := model.drafter.output.width) not in (None, model.config.width):
            raise ValueError(
                f"the lm_head of {type(loaded).__name__} reads states of {model.config.width} values, but its decoder "
                f"gives {width}: draft heads need a base in which these are the same."
            )
        model.drafter.copy_from_base()
        loaded.requires_grad_(False)
        model.drafter.train(loaded.training)
        model.training = loaded.training
        model._take_generation_config({})
        model.generation_config.draft_tree = DEFAULT_TREE if model.drafter.copies is None else LOOKUP
        if not model.training and last_layer(loaded)[0].type != "meta" and (reason := model.why_no_drafts()):
            logger.warning_once(f"These heads will never draft, the base will decode by itself: {reason}.")
        return model

    @classmethod
    def _share_large_projections(cls, config: Any, base: nn.Module) -> None:
        """Let heads share the base's lm_head where their own projections would be large beside the base."""
        with torch.device("meta"), no_init_weights():
            projections = getattr(cls.drafter_class(config), "projections", None)
        if projections is None or any(getattr(config, name, None) for name in ("lm_head_rank", "lm_head_bias")):
            return
        size, of_base = (sum(parameter.numel() for parameter in module.parameters()) for module in (projections, base))
        if size < LARGE_PROJECTIONS or 3 * size <= of_base:
            return
        config.share_lm_head = True
        logger.warning(
            f"The heads share the base's lm_head: projections of their own would have {size:,} parameters, the base "
            f"has {of_base:,}. share_lm_head=False gives them their own."
        )

    @classmethod
    def _refuse_other_family(cls, config: DraftHeadConfig) -> None:
        if not isinstance(config, cls.config_class):
            raise TypeError(
                f"config is a {type(config).__name__}, but {cls.__name__} is configured by a "
                f"{cls.config_class.__name__}: give one of these, or use the model class of that family."
            )

    def _attach(self, base: Any) -> None:
        """Make `base` this model's base, and put the drafter where the base's last layer is.

        What transformers collects from submodels in `post_init` is carried over by hand: `post_init` would touch the
        weights of a live base.
        """
        self.base = base
        self.drafter.attach(base)
        self.config.base_config = base.config  # after construction, so that both stay one object
        self.config._attn_implementation_internal = getattr(base.config, "_attn_implementation_internal", None)
        self.all_tied_weights_keys = self._tied("base") | self._tied("drafter")
        for name in (
            "_no_split_modules",
            "_skip_keys_device_placement",
            "_keep_in_fp32_modules",
            "_keep_in_fp32_modules_strict",
        ):
            setattr(self, name, set(getattr(self, name) or ()) | set(getattr(base, name, None) or ()))
        self._no_split_modules.add(type(self.drafter).__name__)  # all of it on one device
        device, dtype = last_layer(base)
        self.config.dtype = dtype
        if device.type != "meta":
            self.drafter.to(device=device, dtype=dtype)
        if device_map := getattr(base, "hf_device_map", None):
            self.hf_device_map = {f"base.{name}" if name else "base": place for name, place in device_map.items()}
            self.hf_device_map["drafter"] = device

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: all but what calls have found out about the base, as a copy does by itself."""
        keep_picklable(self)
        return {name: value for name, value in self.__dict__.items() if name not in FOUND_BY_CALLS}

    def _take_generation_config(self, heads: Mapping[str, Any]) -> None:
        """Generate as the base does, with the heads' own settings on top."""
        ours = HeadsGenerationConfig.of(getattr(self.base, "generation_config", None))
        ours._from_model_config = False  # such a config drops the settings that transformers does not know when loaded
        for name, value in DraftSettings.stored_in(heads).items():
            setattr(ours, name, value)
        self.generation_config = ours

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls: type[LoadedModel],
        pretrained_model_name_or_path: str | os.PathLike | None,
        *,
        config: DraftHeadConfig | str | os.PathLike | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        use_safetensors: bool | None = None,
        base_model: str | os.PathLike | nn.Module | None = None,
        base_revision: str | None = None,
        convert: bool = False,
        generation_config: GenerationConfig | None = None,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> LoadedModel | tuple[LoadedModel, dict[str, Any]]:
        """Load trained heads and their base.

        Args:
            pretrained_model_name_or_path: folder or Hub id of the heads, saved with or without their base; None with
                `config` and `state_dict` in its place.
            config: use this config instead of the checkpoint's.
            state_dict: the tensors of the heads, or of the whole model.
            use_safetensors: as in transformers, for the base; heads are never read from anything else.
            base_model: Hub id, path or loaded model to use instead of the base that the config names.
            base_revision: branch, tag or commit of the base; default: the one that the heads were trained on.
            convert: the heads are in the layout of another project (`docs/formats.md` lists them); a file of weights
                may be given as well. What the layout does not say is to be given here: the base, or fields of the
                family's config.
            generation_config: use this one instead of the base's with the heads' settings.
            output_loading_info: also return what transformers tells about a loading: which tensors were missing,
                unexpected or mismatched. There are none, for such a checkpoint is refused.
            kwargs: `revision`, `subfolder` and `variant` speak of the heads' checkpoint; `cache_dir`,
                `force_download`, `local_files_only`, `proxies` and `token` of every download; all others (`dtype`,
                `device_map`, `quantization_config`, `attn_implementation`, ...) are for the base. The drafter goes to
                the device and dtype of the base's last layer.

        Raises:
            OSError: heads or base are not there, or a file cannot be read.
            ValueError: the checkpoint is of another kind, a tensor is missing, unknown or of another shape, or the
                base is not the one that the heads were made for.
        """
        path = None if pretrained_model_name_or_path is None else os.fspath(pretrained_model_name_or_path)
        if (path is None) != (state_dict is not None) or (path is None and not isinstance(config, PreTrainedConfig)):
            raise ValueError(
                "give the folder or Hub id of the heads, or None with config= and state_dict= in its place."
            )
        source = HeadsSource(
            path,
            fetch={key: kwargs.pop(key) for key in HUB_ARGUMENTS & set(kwargs)},
            heads={key: kwargs.pop(key) for key in HEADS_ARGUMENTS & set(kwargs)},
            base=base_model,
            base_revision=base_revision,
            use_safetensors=use_safetensors,
            arguments=kwargs,
        )
        if convert:
            if config is not None:
                raise ValueError("config= cannot be given with convert=True, which reads it from the layout: drop it.")
            model = cls._from_other_layout(source)
        else:
            heads = read_heads_config(source.path, source.hub, cls.config_class, config)
            if state_dict is not None:
                heads.base_included = any(name.startswith("base.") for name in state_dict)
            load = cls._with_its_base if heads.base_included else cls._from_heads
            model = load(source, heads, state_dict)
        if not isinstance(base_model, nn.Module):  # a live model stays as it is
            model.base.requires_grad_(False)
        model.checkpoint_revision = source.heads.get("revision")
        if generation_config is not None:
            model.generation_config = HeadsGenerationConfig.of(generation_config)
        if not output_loading_info:
            return model
        return model, {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}

    @classmethod
    def _from_other_layout(cls: type[LoadedModel], source: HeadsSource) -> LoadedModel:
        """The model of heads in the layout of another project."""
        fields = {name: source.arguments.pop(name) for name in cls.config_class.heads_fields() & set(source.arguments)}
        config, tensors, settings = _formats().converted(
            cls, source.path, base_model=source.base, base_revision=source.base_revision, fields=fields, hub=source.hub
        )
        arguments = source.for_the_base(config)
        model, adapter = cls._blank(config, build_base=False), source.adapter(beside=False)
        return model._on_base(source, tensors, settings, adapter, arguments)

    @classmethod
    def _from_heads(
        cls: type[LoadedModel], source: HeadsSource, config: DraftHeadConfig, state_dict: Mapping[str, Tensor] | None
    ) -> LoadedModel:
        """The model of a checkpoint that holds the heads alone."""
        arguments = source.for_the_base(config)
        variant = source.heads.get("variant")
        model, tensors = cls._without_memory(source.path, config, variant, source.hub, state_dict)
        settings = {} if source.given is None else read_generation_settings(source.path, source.hub)
        # What lies beside the weights is read before the base is, which may take minutes.
        return model._on_base(source, tensors, settings, source.adapter(), arguments)

    def _on_base(
        self: LoadedModel,
        source: HeadsSource,
        tensors: Mapping[str, Tensor],
        settings: Mapping[str, Any],
        adapter: tuple[str | None, dict[str, Any]],
        arguments: dict[str, Any],
    ) -> LoadedModel:
        """Heads without memory, with their tensors, settings and adapter, on their base."""
        self.config.__dict__.pop("quantization_config", None)  # of a base that is not here
        base = load_base(source.place, self.config, source.base, source.base_revision, source.fetch, arguments)
        if active_adapter(base) is None:
            adapt(base, source.given, self.config, source.hub, isinstance(source.base, nn.Module))
        self._fill(tensors, *last_layer(base))
        self.drafter.check_values(source.path)
        self._attach(base)
        self._take_generation_config(settings)
        place, how = adapter
        if place is not None:
            self.load_adapter(place, adapter_kwargs=how)
        return self

    @classmethod
    def _with_its_base(
        cls: type[LoadedModel], source: HeadsSource, config: DraftHeadConfig, state_dict: Mapping[str, Tensor] | None
    ) -> LoadedModel:
        """The model of a checkpoint that holds its base too, as transformers loads it; else as `_from_heads`."""
        arguments = source.for_the_base(config)
        # What does not fit is refused, also of an adapter of the whole model, before transformers reads it.
        untouched, variant = copy.deepcopy(config), source.heads.get("variant")
        cls._without_memory(source.path, untouched, variant, source.hub, state_dict)
        source.adapter()
        if source.given is not None:
            read_generation_settings(source.path, source.hub)
        if source.base is not None or source.base_revision is not None:
            raise ValueError(f"{source.path!r} contains its own base: drop base_model= and base_revision=.")
        if source.use_safetensors is False:
            raise ValueError(
                f"{source.path!r} is only read as safetensors, for a pickle can run code: drop use_safetensors."
            )
        arguments |= {**source.heads, **source.fetch, "config": config, "state_dict": state_dict and dict(state_dict)}
        if arguments.get("quantization_config") is not None:
            arguments["quantization_config"] = cls._sparing_the_drafter(config, arguments["quantization_config"])
        try:
            arguments |= {"use_safetensors": True, "output_loading_info": True}
            model, info = super().from_pretrained(source.given, **arguments)
        except (ArithmeticError, AttributeError, LookupError) as error:
            raise ValueError(
                f"the base in {source.path!r} cannot be built from its config ({in_one_line(error)}): correct "
                "config.json."
            ) from error
        refuse_damage(source.path, info)
        model.drafter.check_values(source.path)
        if "hf_quantizer" in model.__dict__:  # only the base is quantized: heads are saved as they are
            model.base.hf_quantizer = model.__dict__.pop("hf_quantizer")
        model.base.generation_config = copy.deepcopy(model.generation_config)
        model.generation_config = HeadsGenerationConfig.of(model.generation_config)
        for name in DraftSettings.names():
            model.base.generation_config.__dict__.pop(name, None)
        return model

    @classmethod
    def _blank(cls: type[LoadedModel], config: DraftHeadConfig, build_base: bool) -> LoadedModel:
        """The model without memory: its names and shapes."""
        with torch.device("meta"), no_init_weights():
            return cls(config, build_base=build_base)

    @classmethod
    def _without_memory(
        cls: type[LoadedModel],
        path: str,
        config: DraftHeadConfig,
        variant: str | None,
        hub: dict[str, Any],
        state_dict: Mapping[str, Tensor] | None = None,
    ) -> tuple[LoadedModel, dict[str, Tensor]]:
        """The model without base and memory, and the heads' tensors, given or in the checkpoint, which fit it."""
        try:
            model = cls._blank(config, build_base=False)
        except (OSError, ValueError):
            raise
        except Exception as error:  # torch and transformers raise anything for values that make no layer
            raise ValueError(
                f"no heads can be built from the config of {path!r} ({in_one_line(error)}): correct config.json."
            ) from error
        expected = model.state_dict()
        state_dict = read_tensors(path, hub, variant) if state_dict is None else state_dict
        tensors = {name: state_dict[name] for name in expected if name in state_dict}
        tied = model._tied("drafter").items()  # a checkpoint holds such weights once
        tensors = {target: tensors[source] for target, source in tied if source in tensors} | tensors
        others = [name for name in state_dict if not (config.base_included and name.startswith("base."))]
        check_tensors(path, tensors, expected, others)
        return model, tensors

    def _tied(self, part: str) -> dict[str, str]:
        """Which weights of the base or the drafter are others of them, by their names in the whole model."""
        tied = getattr(getattr(self, part), "all_tied_weights_keys", None) or {}
        return {f"{part}.{target}": f"{part}.{source}" for target, source in tied.items()}

    @torch.inference_mode(False)
    def _fill(self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        """Give a drafter without memory its tensors; where device and type are theirs, they stay mapped from disk."""
        device = torch.device("cpu") if device.type == "meta" else device  # all of the base is offloaded
        moved = {
            name: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
            for name, tensor in tensors.items()
        }
        self.load_state_dict(moved, assign=True)
        for module in self.drafter.modules():
            for name in module._non_persistent_buffers_set:
                setattr(module, name, torch.empty_like(getattr(module, name), device=device))
            self._init_weights(module)
        self.eval()

    @classmethod
    def _sparing_the_drafter(cls, config: DraftHeadConfig, quantization: Any) -> Any:
        """The quantization config, with the drafter (and, as by default, the lm_head) left as they are."""
        spared = copy.deepcopy(quantization)
        values = spared if isinstance(spared, dict) else vars(spared)
        in_bitsandbytes = {"llm_int8_skip_modules", "load_in_4bit", "load_in_8bit", "_load_in_8bit"} & set(values)
        name = "llm_int8_skip_modules" if in_bitsandbytes else "modules_to_not_convert"
        if values.get(name) is None:
            blank = cls._blank(copy.deepcopy(config), build_base=True)
            head = blank.base.get_output_embeddings()
            values[name] = [name for name, module in blank.named_modules() if module is head]
        values[name] = [*values[name], "drafter"]
        return spared


def _formats() -> Any:
    """The room of other projects' layouts, which imports this one."""
    from hf_drafthead import formats

    return formats
