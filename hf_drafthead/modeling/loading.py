"""How a model with draft heads is made: from a config, on a base, or from a checkpoint."""

import copy
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils import GENERATION_CONFIG_NAME, logging

from hf_drafthead.bases.releases import keep_picklable
from hf_drafthead.exactness import exact as make_exact
from hf_drafthead.generation.mixin import DraftHeadGenerationMixin
from hf_drafthead.generation.settings import DEFAULT_TREE, DraftSettings
from hf_drafthead.generation.tree import LOOKUP, resolve
from hf_drafthead.modeling import files
from hf_drafthead.modeling.adapters import activate, find_adapter, load_adapter
from hf_drafthead.modeling.base_model import (
    GIVE_BASE,
    PLACE_ARGUMENTS,
    auto_class,
    fingerprint,
    last_layer,
    load_base,
    name_base,
    width_of,
)
from hf_drafthead.modeling.config import BASE_FOLDER, MODEL_TYPE_PREFIX, DraftHeadConfig, HeadsGenerationConfig
from hf_drafthead.modeling.drafter import Drafter
from hf_drafthead.modeling.files import refusing, shortened
from hf_drafthead.modeling.layers import Undrawn, share_start

logger = logging.get_logger(__name__)

LoadedModel = TypeVar("LoadedModel", bound="LoadableModel")

LARGE_PROJECTIONS = 1 << 24  # parameters from which heads' own projections may be shared instead
GIVE_CHECKPOINT = "give the folder of a draft-head checkpoint, or its id on the Hub"
IN_ANOTHER_LAYOUT = "if these are heads in another project's layout, give convert=True, or convert them once with "
IN_ANOTHER_LAYOUT += "`hf-drafthead convert`"
# What says how a base is computed with, which AutoModel puts into the config of the heads.
IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")


class LoadableModel(DraftHeadGenerationMixin, PreTrainedModel):
    """A base and a drafter in one model, and the ways to make it; `modeling.base` has what it does."""

    config: DraftHeadConfig
    generation_config_class = HeadsGenerationConfig
    drafter_class: ClassVar[type[Drafter]]
    checkpoint_revision: str | None = None
    _as_loaded: Any = None  # what the base was, see `fingerprint`; None if it was never loaded

    def __init__(self, config: DraftHeadConfig, build_base: bool = True) -> None:
        if not isinstance(config.base_config, PreTrainedConfig):
            what = f"{type(config).__name__} has no base_config: give it the config of the base"
            raise ValueError(f"{what}, or use {type(self).__name__}.from_base(...).")
        self._refuse_other_family(config)
        super().__init__(config)
        # The base comes first: device and dtype of the model are those of its first parameter.
        self.register_module("base", None)
        if build_base:
            self.base = _kind_of(config.base_config).from_config(copy.deepcopy(config.base_config))
            config.last_hidden_size = width_of(self.base)
        self.drafter = self.drafter_class(config)
        self.post_init()
        if build_base:
            self.attach(self.base)
            self._take_generation_config({})
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
        config_fields |= {name: kwargs.pop(name) for name in cls.config_class.own_fields() & set(kwargs)}
        if "revision" in kwargs:
            raise TypeError("from_base has no argument revision=: give base_revision=, which is the base's.")
        loaded, origin = load_base(base, {**kwargs, "revision": base_revision})
        if loaded.get_output_embeddings() is None:
            raise ValueError(f"{type(loaded).__name__} has no lm_head: draft heads need a causal language model.")
        origin["last_hidden_size"] = width_of(loaded)
        if by_size := config_fields.get("share_lm_head") is None:
            config_fields.pop("share_lm_head", None)
        heads_config: Any = cls.config_class(base_config=loaded.config, **origin | config_fields)
        if by_size and getattr(heads_config, "share_lm_head", None) is False:
            cls._share_large_projections(heads_config, loaded)
        model = cls(heads_config, build_base=False)
        model.attach(loaded)
        if (width := model.drafter.output.width) not in (None, model.config.width):
            what = f"the lm_head of {type(loaded).__name__} reads states of {model.config.width} values"
            raise ValueError(f"{what}, but its decoder gives {width}: draft heads need a base with one width of both.")
        model.drafter.copy_from_base()
        share_start(model.drafter, loaded)
        loaded.requires_grad_(False)
        model._as_loaded = fingerprint(loaded, model.config)
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
        with torch.device("meta"):
            projections = getattr(cls.drafter_class(config), "projections", nn.Module())
        size, of_base = (sum(parameter.numel() for parameter in module.parameters()) for module in (projections, base))
        if size >= max(LARGE_PROJECTIONS, of_base / 3):
            config.share_lm_head = True
            logger.warning(
                f"The heads share the base's lm_head: projections of their own would have {size:,} parameters, the "
                f"base has {of_base:,}. share_lm_head=False gives them their own."
            )

    @classmethod
    def _refuse_other_family(cls, config: DraftHeadConfig) -> None:
        if not isinstance(config, cls.config_class):
            what = f"config is a {type(config).__name__}, but {cls.__name__} is configured by a"
            raise TypeError(f"{what} {cls.config_class.__name__}: give one of these, or use the class of that family.")

    def attach(self, base: Any) -> None:
        """Make `base` this model's base, and put the drafter where the base's last layer is."""
        self.base = base
        self.drafter.attach(base)
        self.config.base_config = base.config  # after construction, so that both stay one object
        self.config._attn_implementation_internal = getattr(base.config, "_attn_implementation_internal", None)
        self.post_init()  # which collects what transformers asks a model about its parts
        self._no_split_modules.add(type(self.drafter).__name__)  # all of it on one device
        device, dtype = last_layer(base)
        self.config.dtype = dtype
        if device.type != "meta":
            self.drafter.to(device=device, dtype=dtype)
        if device_map := getattr(base, "hf_device_map", None):
            self.hf_device_map = {f"base.{name}" if name else "base": place for name, place in device_map.items()}
            self.hf_device_map["drafter"] = device

    def init_weights(self) -> None:
        """Nothing: parameters and buffers have their values from where they were made, also those of a live base."""

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: all but what calls have found out about the base, as a copy does by itself."""
        keep_picklable(self)
        return {name: value for name, value in self.__dict__.items() if name != "_readers"}

    def _take_generation_config(self, stored: Mapping[str, Any]) -> None:
        """Generate as the base does, with what is stored with the heads on top."""
        ours = HeadsGenerationConfig.of(getattr(self.base, "generation_config", None))
        ours._from_model_config = False  # such a config drops the settings that transformers does not know when loaded
        known = {*vars(GenerationConfig()), *DraftSettings.names()} - {"transformers_version"}
        said = {name: stored[name] for name in known & set(stored) if name[0] != "_" and stored[name] is not None}
        with _building(str(self.name_or_path)):
            read = vars(HeadsGenerationConfig(**said))
        ours.__dict__.update({name: read[name] for name in said})
        self.generation_config = ours

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls: type[LoadedModel],
        pretrained_model_name_or_path: str | os.PathLike,
        *,
        config: DraftHeadConfig | None = None,
        base_model: str | os.PathLike | nn.Module | None = None,
        base_revision: str | None = None,
        convert: bool = False,
        generation_config: GenerationConfig | None = None,
        output_loading_info: bool = False,
        exact: bool = False,
        **kwargs: Any,
    ) -> LoadedModel | tuple[LoadedModel, dict[str, Any]]:
        """Load trained heads and their base.

        Args:
            pretrained_model_name_or_path: folder or Hub id of the heads, saved with or without their base.
            config: use this config instead of the checkpoint's.
            base_model: Hub id, path or loaded model to use instead of the base that the config names.
            base_revision: branch, tag or commit of the base; default: the one that the heads were trained on.
            convert: the heads are in the layout of another project (`docs/formats.md` lists them); a file of weights
                may be given as well. What the layout does not say is to be given here: the base, or fields of the
                family's config.
            generation_config: use this one instead of the base's with the heads' settings.
            output_loading_info: also return what transformers tells about a loading: which tensors were missing,
                unexpected or mismatched. There are none, for such a checkpoint is refused.
            exact: give every token the same bits, drafted or not and in any batch, see `hf_drafthead.exact`.
            kwargs: `revision` and `subfolder` speak of the heads' checkpoint; `cache_dir`, `force_download`,
                `local_files_only`, `proxies` and `token` of every download; all others (`dtype`, `device_map`,
                `quantization_config`, `attn_implementation`, ...) are for the base, which is quantized as it was when
                the heads were saved, unless `quantization_config=None`. The drafter goes to the device and dtype of the
                base's last layer.

        Raises:
            OSError: heads or base are not there, or a file cannot be read.
            ValueError: the checkpoint is of another kind, a tensor is missing, unknown or of another shape, or the
                base is not the one that the heads were made for.
        """
        if "state_dict" in kwargs:
            raise TypeError("state_dict= is not taken: load the heads, then model.load_state_dict(...).")
        path = os.fspath(pretrained_model_name_or_path)
        hub = {key: value for key in PLACE_ARGUMENTS & set(kwargs) if (value := kwargs.pop(key)) is not None}
        of_both = dict(kwargs.pop("adapter_kwargs", None) or {})  # of transformers, which looked for one with the heads
        if isinstance(pieces := kwargs.get("device_map"), dict):  # of the whole model
            of_base = {f".{name}".removeprefix(".base").lstrip("."): place for name, place in pieces.items()}
            kwargs["device_map"] = {name: place for name, place in of_base.items() if name != "drafter"}
        tensors: Any = None
        if convert:
            if config is not None:
                raise ValueError("config= cannot be given with convert=True, which reads it from the layout: drop it.")
            fields = {name: kwargs.pop(name) for name in cls.config_class.heads_fields() & set(kwargs)}
            config, tensors, settings, compare = _formats().converted(
                cls, path, base_model=base_model, base_revision=base_revision, fields=fields, hub=hub
            )
        else:
            config = copy.deepcopy(config) or read_heads_config(path, hub, cls.config_class)
            settings = read_generation_settings(path, hub)
        for name in IMPLEMENTATIONS:
            if (choice := getattr(config, f"_{name}")) is not None:
                kwargs[name] = choice
            setattr(config, f"_{name}", None)
        # What lies beside the weights is read before the base is, which may take minutes.
        model, inside = cls._heads_alone(path, config, tensors or files.read_tensors(path, hub))
        model.name_or_path = model.config.name_or_path = path
        if inside and base_model is None:
            base = model._from_inside(inside, settings, kwargs)
        else:
            base = model._take_base(base_model, base_revision, hub, kwargs)
        for note in compare(base) if convert else ():
            logger.warning_once(f"{path!r}: {note}")
        model.attach(base)
        model.drafter.check_values(path)
        model._take_generation_config(settings)
        live = isinstance(base_model, nn.Module)
        if not live:  # a live model stays as it is
            base.requires_grad_(False)
        model._as_loaded = fingerprint(base, model.config)
        model._take_adapters(path, hub, live)
        if not convert:
            if folder := find_adapter(of_both.pop("_adapter_model_path", None) or path, {**hub, **of_both}):
                model.load_adapter(folder)
        model.checkpoint_revision = hub.get("revision")
        if generation_config is not None:
            model.generation_config = HeadsGenerationConfig.of(generation_config)
        model = make_exact(model) if exact else model
        nothing: Any = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
        return (model, nothing) if output_loading_info else model

    @classmethod
    def _heads_alone(cls: type[LoadedModel], path: str, config: Any, tensors: dict[str, Tensor]) -> tuple[Any, Any]:
        """The model without a base, and tensors of a base that lie with the heads, as earlier releases wrote them."""
        of_base = [name for name in tensors if name.startswith("base.")] if config.base_included else ()
        inside = {name.removeprefix("base."): tensors.pop(name) for name in of_base}
        with _building(path), Undrawn():  # memory that nothing is written to
            model = cls(config, build_base=False)
        tied = model.all_tied_weights_keys.items()  # a checkpoint holds such weights once
        there = {target: tensors[source] for target, source in tied if source in tensors} | tensors
        check_tensors(path, there, model.state_dict())
        model.load_state_dict(there, assign=True)
        model.tie_weights()
        return model.eval(), inside

    @classmethod
    def _blank(cls: type[LoadedModel], config: DraftHeadConfig, path: str) -> LoadedModel:
        """The model without base and memory: its names and shapes."""
        with _building(path), torch.device("meta"):
            return cls(config, build_base=False)

    def _take_base(self, chosen: Any, revision: str | None, hub: Mapping[str, Any], arguments: dict[str, Any]) -> Any:
        """The base that these heads run on, checked against what they were trained for: the one that the user has
        chosen, the one beside them, or the one that the config names."""
        config, path, inside = self.config, self.config.name_or_path, hub.get("subfolder")
        place = os.path.join(path, inside) if inside and os.path.isdir(path) else path
        beside = chosen is None and config.base_included
        if beside:
            if revision is not None:
                raise ValueError(f"{path!r} contains its own base: drop base_revision=.")
            # a pickle could run code
            where = {**hub, "subfolder": "/".join(filter(None, (inside, BASE_FOLDER))), "use_safetensors": True}
            chosen = path
        elif chosen is not None:
            where = {**hub, "revision": revision, "subfolder": None}
        elif not (chosen := files.full_name(config.base_model_name_or_path or "", place)):
            raise OSError(f"{path!r} does not say which base it was trained for: {GIVE_BASE}")
        else:
            where = {**hub, "revision": revision or config.base_model_revision, "subfolder": config.base_subfolder}
            where["gguf_file"] = arguments.get("gguf_file") or config.base_gguf_file
            if config.base_quantization is not None and "quantization_config" not in arguments:
                advice = "correct it, or give quantization_config=, None for the base as published."
                with refusing(ValueError, "base_quantization of config.json cannot be used", advice):
                    where["quantization_config"] = AutoQuantizationConfig.from_dict(config.base_quantization)
        base, origin = load_base(chosen, {**arguments, **where}, config)
        new_name = origin["base_model_name_or_path"] != config.base_model_name_or_path
        if not beside and (new_name or not isinstance(chosen, nn.Module)):  # a live one has no more than its name
            name_base(config, place, origin)
        config.base_included = beside
        return base

    def _from_inside(self, state: Mapping[str, Tensor], settings: Mapping[str, Any], arguments: Any) -> Any:
        """The base of which the tensors lie with the heads, as earlier releases wrote them, settings and all."""
        path, config = self.config.name_or_path, copy.deepcopy(self.config.base_config)
        how = {"config": config, "state_dict": state, "output_loading_info": True, **arguments}
        with _building(path):
            with torch.device("meta"):
                kind = type(_kind_of(config).from_config(copy.deepcopy(config)))
            base, info = kind.from_pretrained(None, **how)
        if wrong := sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"]])):
            raise ValueError(f"{path!r} does not fit its config: its base and {wrong[0]!r}: correct config.json.")
        of_base = {name: value for name, value in settings.items() if name not in DraftSettings.names()}
        base.generation_config = GenerationConfig.from_dict(of_base)
        return base

    def _take_adapters(self, path: str, hub: Mapping[str, Any], live: bool) -> None:
        """Put the adapters on the base that it had when the heads were saved."""
        config, older = self.config, self.config.adapter_name_or_path
        wanted = dict(config.base_adapters or ({"default": True} if older else {}))
        if wanted and live:
            what = f"these heads were trained on a base with the adapter {older or ', '.join(wanted)!r}"
            advice = "fewer guesses may be accepted; load it with model.load_adapter(...)"
            logger.warning_once(f"{what}, and the base given has none: {advice}.")
            return
        for name in wanted:
            folder = find_adapter(path, hub, older or os.path.join(BASE_FOLDER, name))
            if folder is None and older:
                fetch = {key: value for key, value in hub.items() if key != "subfolder"}
                folder = find_adapter(older, {**fetch, "revision": config.adapter_revision or "main"})
            if folder is None:
                raise OSError(f"the adapter {name!r} of the base of {path!r} was not found: copy the heads again.")
            load_adapter(self.base, folder, name)
        if wanted:
            activate(self.base, [name for name, on in wanted.items() if on])
        config.base_adapters = config.adapter_name_or_path = config.adapter_revision = None


def _kind_of(config: PreTrainedConfig) -> Any:
    """The class of transformers that makes a base of this config."""
    if (kind := auto_class(config)) is None:
        what = f"base_config is of a {shortened.repr(config.model_type)} model, which is no causal language model"
        raise ValueError(f"{what} of transformers: a base with code of its own is loaded apart, with base_model=.")
    return kind


def read_heads_config(
    path: str, hub: Mapping[str, Any] = files.NO_OPTIONS, family: type[DraftHeadConfig] = DraftHeadConfig
) -> Any:
    """The config of a checkpoint with draft heads of a family."""
    # heads lie under the name of their owner on the Hub: a name without one is not asked for there
    if files.is_missing_folder(path) or ("/" not in path and not os.path.isdir(path)):
        raise OSError(f"there is no folder {path!r}: {GIVE_CHECKPOINT}.")
    what, advice = f"{path!r} is no draft-head checkpoint", f"{GIVE_CHECKPOINT}; {IN_ANOTHER_LAYOUT}."
    with refusing(OSError, what, advice, of=(OSError, files.HTTP_ERROR)):
        fields, _ = DraftHeadConfig.get_config_dict(path, **hub)
        if not fields:
            raise OSError("there is no config.json, or it is empty")
    model_type = str(fields.get("model_type"))
    known = sorted(name for name in CONFIG_MAPPING if name.startswith(MODEL_TYPE_PREFIX))
    wanted = known if family is DraftHeadConfig else [family.model_type]
    if model_type in wanted:
        config = CONFIG_MAPPING[model_type].from_dict(fields)
        if family is DraftHeadConfig and config.base_config is None:
            raise ValueError(f"{path!r} does not hold the config of its base: save it again, or correct config.json.")
        return config
    what = f"{path!r} holds {shortened.repr(model_type)} heads, expected {' or '.join(wanted)}"
    advice = "load it with AutoModel; a newer hf_drafthead may know other families"
    if not model_type.startswith(MODEL_TYPE_PREFIX):
        what = f"{path!r} holds a {shortened.repr(model_type)} model without draft heads"
        advice = f"{GIVE_CHECKPOINT}; to put new heads on a base use from_base; {IN_ANOTHER_LAYOUT}"
    raise ValueError(f"{what}: {advice}.")


def read_generation_settings(path: str, hub: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint's generation config says, its draft tree checked; nothing if it has none."""
    file = files.fetch_file(path, GENERATION_CONFIG_NAME, hub)
    settings = files.read_json(file) if file else {}
    if isinstance(settings.get("draft_tree"), (list, dict)):
        resolve(settings["draft_tree"], None, 2**31)  # refuses a tree that no call of generate could use
    return settings


def check_tensors(path: str, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare the tensors of a checkpoint's drafter with tensors of the shapes and types that its config asks for."""
    for name in [*expected, *sorted(set(tensors) - set(expected))]:
        there, wanted = _form(tensors.get(name)), _form(expected.get(name))
        if there != wanted:
            has = f"has {shortened.repr(name)} as {there}" if name in tensors else f"lacks the tensor {name!r}"
            advice = "save the checkpoint again, or correct config.json."
            raise ValueError(f"{path!r} {has}, but its config asks for {wanted}: {advice}")


def _form(tensor: Tensor | None) -> str:
    """The kind of number, and the shape: all floating types of two bytes and more are converted into each other."""
    if tensor is None:
        return "none"
    converted = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
    kind = "floating-point numbers" if converted else str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {shortened.repr(list(tensor.shape))}"


def _building(path: str) -> AbstractContextManager[None]:
    """Say of which checkpoint a config is from which nothing can be built; torch and transformers raise anything."""
    what = f"{path!r} cannot be built from its config"
    return refusing(ValueError, what, "correct config.json.", but=(OSError, ValueError))


def _formats() -> Any:
    """The room of other projects' layouts, which imports this one."""
    from hf_drafthead import formats

    return formats
