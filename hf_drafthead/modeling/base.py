"""The model that holds a base and its drafter: attach, load, save."""

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.utils import logging

from hf_drafthead.generation.mixin import DraftHeadGenerationMixin
from hf_drafthead.generation.settings import DEFAULT_TREE, DraftSettings
from hf_drafthead.modeling.adapters import (
    FOLDER,
    active_adapter,
    adapt,
    bare_state,
    find_adapter,
    is_of_a_whole_model,
    merged_state,
    save_adapter,
    unwrapped,
)
from hf_drafthead.modeling.base_model import (
    auto_class,
    full_name,
    is_language_model,
    last_layer,
    load_base,
    load_new_base,
    refuse_loading_arguments,
    refuse_misspelt,
    refuse_unfit,
    save_tokenizer,
)
from hf_drafthead.modeling.checkpoint import (
    check_tensors,
    checkpoint_files,
    map_wanted,
    read_config,
    read_generation_settings,
    refuse_damage,
)
from hf_drafthead.modeling.config import ABOUT_THE_BASE, DraftHeadConfig
from hf_drafthead.modeling.drafter import Drafter
from hf_drafthead.modeling.files import in_one_line, shortened

logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound="DraftHeadPreTrainedModel")

# Arguments of from_pretrained that speak of the heads' own files, and of how any file is fetched.
HEADS_ARGUMENTS = {"revision", "subfolder", "variant", "_from_auto", "_from_pipeline", "adapter_kwargs"}
HUB_ARGUMENTS = {"cache_dir", "force_download", "local_files_only", "proxies", "token"}


class DraftHeadPreTrainedModel(DraftHeadGenerationMixin, PreTrainedModel):
    """A base model and the draft heads that make its `generate` faster.

    `MedusaForCausalLM(config)` builds both from the config with random weights; `from_base` puts fresh heads on an
    existing base; `from_pretrained` loads trained heads and finds their base.

    Attributes:
        base: the causal language model whose text is reproduced.
        drafter: the heads.
        checkpoint_revision: branch, tag or commit of the Hub that the heads were loaded from.
    """

    config: DraftHeadConfig
    drafter_class: ClassVar[type[Drafter]]
    checkpoint_revision: str | None = None
    # The outer model has no attention of its own: any choice is passed to the base, which knows what it can do.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # each head's loss is a mean over its own labels

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
            if not is_language_model(config.base_config):
                raise ValueError(
                    f"base_config is of a {shortened.repr(config.base_config.model_type)} model, which is no causal "
                    "language model of transformers: a base with code of its own is loaded apart, with base_model=."
                )
            base_config = copy.deepcopy(config.base_config)
            self.base = auto_class(base_config).from_config(base_config, trust_remote_code=False)
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
            base: Hub id or path of a causal language model or of an adapter for one, or a loaded model, which may have
                adapters and is used, not copied. Its parameters are frozen: what trains the model trains the heads.
            config: take the family's fields from this config.
            base_revision: branch, tag or commit of the base.
            kwargs: fields of the family's config (`num_draft_heads=4`), before those of `config`; all others go to
                `AutoModelForCausalLM.from_pretrained`.

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
        own = cls.config_class.heads_fields()
        config_fields = {name: getattr(config, name) for name in own} if config is not None else {}
        config_fields |= {name: kwargs.pop(name) for name in (own | ABOUT_THE_BASE) & set(kwargs)}
        loaded: Any = base
        commit, adapter, adapter_commit = base_revision, None, None
        if isinstance(base, nn.Module):
            loaded = unwrapped(base)
            refuse_unfit(loaded.config, type(base).__name__, loaded=True)
            refuse_misspelt(kwargs, own)
            refuse_loading_arguments(loaded, kwargs)
            name = getattr(loaded.config, "_name_or_path", "") or None
        else:
            name = os.fspath(base)
            fetch = {key: kwargs.pop(key) for key in HUB_ARGUMENTS & set(kwargs)}
            loaded, name, commit, adapter, adapter_commit = load_new_base(name, base_revision, fetch, kwargs, own)
        if loaded.get_output_embeddings() is None:
            raise ValueError(f"{type(loaded).__name__} has no lm_head: draft heads need a causal language model.")
        name = full_name(name) if name else None
        found = {"base_model_name_or_path": name, "base_model_revision": commit}
        config_fields = found | {"adapter_name_or_path": adapter, "adapter_revision": adapter_commit} | config_fields
        model = cls(cls.config_class(base_config=loaded.config, **config_fields), build_base=False)
        model._attach(loaded)
        model.drafter.copy_from_base()
        loaded.requires_grad_(False)
        model.drafter.train(loaded.training)
        model.training = loaded.training
        model._take_generation_config({})
        model.generation_config.draft_tree = DEFAULT_TREE
        if not model.training and last_layer(loaded)[0].type != "meta" and (reason := model.why_no_drafts()):
            logger.warning_once(f"These heads will never draft, the base will decode by itself: {reason}.")
        return model

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
        tied = getattr(base, "all_tied_weights_keys", None) or {}
        self.all_tied_weights_keys = {f"base.{target}": f"base.{source}" for target, source in tied.items()}
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
        placed = getattr(base, "hf_device_map", None)
        if placed:
            self.hf_device_map = {f"base.{name}" if name else "base": place for name, place in placed.items()}
            self.hf_device_map["drafter"] = device

    def _take_generation_config(self, heads: Mapping[str, Any]) -> None:
        """Generate as the base does, with the heads' own settings on top."""
        ours = copy.deepcopy(getattr(self.base, "generation_config", None) or GenerationConfig())
        ours._from_model_config = False  # such a config drops the settings that transformers does not know when loaded
        for name, value in DraftSettings.stored_in(heads).items():
            setattr(ours, name, value)
        self.generation_config = ours

    # ---- load -------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls: type[Model],
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
    ) -> Model | tuple[Model, dict[str, Any]]:
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
        given = None if pretrained_model_name_or_path is None else os.fspath(pretrained_model_name_or_path)
        if (given is None) != (state_dict is not None) or (given is None and not isinstance(config, PreTrainedConfig)):
            raise ValueError(
                "give the folder or Hub id of the heads, or None with config= and state_dict= in its place."
            )
        path = given or "state_dict"
        fetch = {key: kwargs.pop(key) for key in HUB_ARGUMENTS & set(kwargs)}
        heads = {key: kwargs.pop(key) for key in HEADS_ARGUMENTS & set(kwargs)}
        hub = fetch | {key: heads[key] for key in ("revision", "subfolder") if heads.get(key) is not None}
        settings: Mapping[str, Any] | None = {} if given is None else None
        found: Mapping[str, Tensor] | None = None
        if convert:
            if config is not None:
                raise ValueError("config= cannot be given with convert=True, which reads it from the layout: drop it.")
            from hf_drafthead.formats import converted

            fields = {name: kwargs.pop(name) for name in cls.config_class.heads_fields() & set(kwargs)}
            config, found, settings = converted(
                cls, path, base_model=base_model, base_revision=base_revision, fields=fields, hub=hub
            )
        else:
            config = read_config(cls.config_class, path, config, hub)
        # AutoModel puts the choice of attention and of experts into the config; they are meant for the base.
        for name in ("attn_implementation", "experts_implementation"):
            if (chosen := getattr(config, f"_{name}")) is not None:
                kwargs.setdefault(name, chosen)
            setattr(config, f"_{name}", None)
        config.name_or_path = given or ""
        if state_dict is not None:
            config.base_included = any(name.startswith("base.") for name in state_dict)
        untouched = copy.deepcopy(config) if config.base_included else config
        if found is not None:
            model, tensors = cls._blank(untouched, build_base=False), found
        else:
            model, tensors = cls._without_memory(path, untouched, heads.get("variant"), hub, state_dict)
        # What lies beside the weights is read before the base is, which may take minutes.
        adapter = dict(heads.get("adapter_kwargs") or {})
        adapted = adapter.pop("_adapter_model_path", None) or path
        with_adapter = (settings is None or adapted != path) and find_adapter(adapted, hub) is not None
        settings = read_generation_settings(path, hub) if settings is None else settings
        info: dict[str, Any] = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}
        info["error_msgs"] = []
        if config.base_included:
            if base_model is not None or base_revision is not None:
                raise ValueError(f"{path!r} contains its own base: drop base_model= and base_revision=.")
            if use_safetensors is False:
                raise ValueError(
                    f"{path!r} is only read as safetensors, for a pickle can run code: drop use_safetensors."
                )
            heads |= fetch | {"config": config, "state_dict": state_dict and dict(state_dict)}
            model = cls._with_its_base(given, heads, kwargs)
        else:
            if use_safetensors is not None:
                kwargs["use_safetensors"] = use_safetensors
            model.config.__dict__.pop("quantization_config", None)  # of a base that is not here
            inside = heads.get("subfolder")
            place = os.path.join(path, inside) if inside and os.path.isdir(path) else path
            base = load_base(place if given else os.curdir, model.config, base_model, base_revision, fetch, kwargs)
            if active_adapter(base) is None:
                adapt(base, given, model.config, hub, isinstance(base_model, nn.Module))
            model._fill(tensors, *last_layer(base))
            model.drafter.check_values(path)
            model._attach(base)
            model._take_generation_config(settings)
            if with_adapter:
                model.load_adapter(adapted, adapter_kwargs=adapter)
        model.base.requires_grad_(False)
        model.checkpoint_revision = heads.get("revision")
        if generation_config is not None:
            model.generation_config = copy.deepcopy(generation_config)
        return (model, info) if output_loading_info else model

    @classmethod
    def _with_its_base(cls: type[Model], path: str | None, heads: dict[str, Any], arguments: dict[str, Any]) -> Model:
        """The model of a checkpoint that holds its base, as transformers loads it."""
        name = path or "state_dict"
        if arguments.get("quantization_config") is not None:
            arguments["quantization_config"] = cls._sparing_the_drafter(
                heads["config"], arguments["quantization_config"]
            )
        try:
            model, info = super().from_pretrained(
                path, **heads, **arguments, use_safetensors=True, output_loading_info=True
            )
        except (ArithmeticError, AttributeError, LookupError) as error:
            raise ValueError(
                f"the base in {name!r} cannot be built from its config ({in_one_line(error)}): correct config.json."
            ) from error
        refuse_damage(name, info)
        model.drafter.check_values(name)
        if "hf_quantizer" in model.__dict__:  # only the base is quantized: heads are saved as they are
            model.base.hf_quantizer = model.__dict__.pop("hf_quantizer")
        model.base.generation_config = copy.deepcopy(model.generation_config)
        for name in DraftSettings.names():
            model.base.generation_config.__dict__.pop(name, None)
        return model

    @classmethod
    def _blank(cls: type[Model], config: DraftHeadConfig, build_base: bool) -> Model:
        """The model without memory: its names and shapes."""
        with torch.device("meta"), no_init_weights():
            return cls(config, build_base=build_base)

    @classmethod
    def _without_memory(
        cls: type[Model],
        path: str,
        config: DraftHeadConfig,
        variant: str | None,
        hub: dict[str, Any],
        given: Mapping[str, Tensor] | None = None,
    ) -> tuple[Model, dict[str, Tensor]]:
        """The model without base and memory, and the heads' tensors, given or in the checkpoint, which fit it.

        Raises:
            OSError, ValueError: as `from_pretrained`.
        """
        try:
            model = cls._blank(config, build_base=False)
        except (OSError, ValueError):
            raise
        except Exception as error:  # torch and transformers raise anything for values that make no layer
            raise ValueError(
                f"no heads can be built from the config of {path!r} ({in_one_line(error)}): correct config.json."
            ) from error
        expected = model.state_dict()
        if given is None:
            tensors, held = map_wanted(checkpoint_files(path, variant, hub), expected)
        else:
            tensors, held = {name: given[name] for name in expected if name in given}, dict.fromkeys(given, path)
        tensors = cls._complete(model, tensors)
        check_tensors(
            path, tensors, expected, [name for name in held if not (config.base_included and name.startswith("base."))]
        )
        return model, tensors

    @classmethod
    def _complete(cls: type[Model], model: Model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a checkpoint with those that it leaves out because they are others of them."""
        return tensors

    @torch.inference_mode(False)
    def _fill(self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        """Give a drafter without memory its tensors; where device and type are theirs, they stay mapped from disk."""
        device = torch.device("cpu") if device.type == "meta" else device  # all of the base is offloaded
        placed = {
            name: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
            for name, tensor in tensors.items()
        }
        self.load_state_dict(placed, assign=True)
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

    # ---- save -------------------------------------------------------------------------------------------------------

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        *,
        include_base: bool = False,
        include_code: bool = True,
        include_tokenizer: bool = True,
        **kwargs: Any,
    ) -> None:
        """Save the heads, and with `include_base=True` the base's weights too.

        An adapter of the base is saved with the heads, or merged into the weights of an included base.

        Args:
            save_directory: folder to write to.
            is_main_process: as in transformers.
            state_dict: save these tensors instead of the model's own.
            include_base: a checkpoint that needs no other: for a base that was trained together with its heads.
            include_code: write the model's code as one file, so that `trust_remote_code=True` loads the checkpoint
                where this package is not installed.
            include_tokenizer: copy the base's tokenizer, if it is on this machine and the folder has none.
            kwargs: as in transformers (`max_shard_size`, `variant`, `push_to_hub`, ...).

        Raises:
            ValueError: `include_base=True` with a quantized base, or several adapters are active.
        """
        quantizer = getattr(self.base, "hf_quantizer", None)
        if include_base and quantizer is not None:
            raise ValueError(
                f"the base is quantized ({quantizer.quantization_config.quant_method}) and cannot be saved with its "
                "heads: save the heads only, or load the base without quantization_config=."
            )
        publish = kwargs.pop("push_to_hub", False)
        words = ("commit_message", "commit_description", "private", "revision", "create_pr", "tags", "license")
        told = {name: kwargs.pop(name) for name in ("repo_id", *words) if name in kwargs}
        adapted, adapter = getattr(self, "_hf_peft_config_loaded", False), active_adapter(self.base)
        if (adapted or adapter) and include_base:
            state_dict = merged_state(self)
        elif adapted:  # adapters of the whole model, heads and all, lie beside the heads
            state_dict = bare_state(self)
            super().save_pretrained(save_directory, is_main_process=is_main_process)
        elif adapter:
            save_adapter(self.base, Path(save_directory) / FOLDER, is_main_process)
        tensors = self.state_dict() if state_dict is None else state_dict
        if not include_base:
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("drafter.")}
            kwargs["save_original_format"] = False  # renamings of the base's architecture are not for the heads
        live, self.config = self.config, self._stored_config(include_base, bool(adapter))
        self._hf_peft_config_loaded = False
        try:
            super().save_pretrained(save_directory, is_main_process=is_main_process, state_dict=tensors, **kwargs)
        finally:
            self.config, self._hf_peft_config_loaded = live, adapted
        if is_main_process:
            if include_code and (write_code := self._code_writer()) is not None:
                write_code(Path(save_directory))
            if include_tokenizer:
                save_tokenizer(self.base, self.config, Path(save_directory))
        if publish and is_main_process:
            repo_id = told.pop("repo_id", None) or os.path.basename(os.path.abspath(save_directory))
            shard = {name: kwargs[name] for name in ("max_shard_size", "token") if name in kwargs}
            self.push_to_hub(repo_id, include_base=include_base, **shard, **told)

    def _stored_config(self, include_base: bool, with_adapter: bool) -> DraftHeadConfig:
        """The config of a checkpoint with or without the base, and with or without an adapter of the base."""
        stored = copy.deepcopy(self.config)
        stored.base_included = include_base
        if self._code_writer() is not None:
            stored.__dict__.pop("auto_map", None)  # of code that the checkpoint may not hold
        if include_base or not with_adapter:
            stored.adapter_name_or_path = stored.adapter_revision = None
        elif not stored.adapter_name_or_path:
            stored.adapter_name_or_path = FOLDER
        return stored

    @staticmethod
    def _code_writer() -> Callable[[Path], None] | None:
        """Writes the model's code into the folder of a checkpoint; None in that code, which transformers copies."""
        try:
            from hf_drafthead.hub_upload.bundle import add_bundle
        except ImportError:
            return None
        return add_bundle

    def load_adapter(self, peft_model_id: str | os.PathLike | None = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """As in transformers; an adapter that was made for the base goes to the base.

        Args:
            peft_model_id: folder or Hub id of the adapter.
            args, kwargs: as in transformers.
        """
        asked = dict(kwargs.get("adapter_kwargs") or {}) | {name: kwargs[name] for name in HUB_ARGUMENTS & set(kwargs)}
        folder = None if peft_model_id is None else find_adapter(os.fspath(peft_model_id), asked)
        if folder is not None and not is_of_a_whole_model(folder):
            return self.base.load_adapter(peft_model_id, *args, **kwargs)
        return super().load_adapter(peft_model_id, *args, **kwargs)

    def push_to_hub(  # type: ignore[override]
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str | None = "50GB",
        tags: list[str] | None = None,
        include_base: bool = False,
        license: str | None = None,
    ) -> Any:
        """Publish the heads, with tokenizer, settings, figures and card, in one commit.

        Args:
            repo_id: `org/name` on the Hub; made if it is not there.
            commit_message, commit_description: of the commit.
            private: whether a new repository is private.
            token: of the Hub; by default that of `hf auth login`.
            revision: branch to push to; made if it is not there.
            create_pr: propose the commit instead of making it.
            max_shard_size: of a file of weights.
            tags: for the card, besides its own.
            include_base: publish the base's weights too, for a base that was trained together with its heads.
            license: of the heads, as the Hub names it (`apache-2.0`), if no card or summary says it yet.

        Returns:
            The commit, as `huggingface_hub.CommitInfo`.

        Raises:
            OSError: the Hub refuses, or cannot be reached.
            ValueError: others could not use these heads: their base is a local path, a tensor is not finite, the card
                is not complete.
        """
        from hf_drafthead.hub_upload import Target, push_model

        target = Target(repo_id, commit_message, commit_description, private, token, revision, create_pr, tags, license)
        return push_model(self, target, include_base=include_base, max_shard_size=max_shard_size or "50GB").commit

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
        training_loss: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The base's own forward: the heads take no part in it; but in training mode labels train the heads.

        Then the loss is that of the family's recipe, and the base is only read: a Trainer that knows nothing of draft
        heads trains these. In eval mode the loss is the base's.

        Args:
            training_loss: return `training_loss(model, **kwargs)` instead. A Trainer asks for the heads' loss through
                this, because what wraps a model to distribute it only sees calls of `forward`.
        """
        if training_loss is not None:
            return training_loss(self, **kwargs)
        if labels is not None and self.training:
            from hf_drafthead.training.plain import heads_output

            return heads_output(
                self,
                input_ids,
                labels,
                attention_mask,
                position_ids,
                inputs_embeds=inputs_embeds,
                past_key_values=past_key_values,
                **kwargs,
            )
        if self.training and "forward" in self.__dict__ and torch.is_grad_enabled():
            self._refuse_to_learn_nothing()
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

    def _refuse_to_learn_nothing(self) -> None:
        """Refuse a trainer that put a forward of its own before ours and asks for the output of a base that is frozen.

        Raises:
            ValueError: nothing could learn from that output.
        """
        if not any(parameter.requires_grad for parameter in self.base.parameters()):
            raise ValueError(
                "the trainer computes a loss of its own from the base's output, from which the heads learn nothing: "
                "let the model compute the loss from labels= (in a subclass of TRL's SFTTrainer, compute_loss = "
                "transformers.Trainer.compute_loss), or use hf_drafthead.training.DraftHeadTrainer."
            )

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

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers, for the base and for decoder layers of the heads."""
        super().set_attn_implementation(*args, **kwargs)
        self.drafter.follow_base()

    def set_experts_implementation(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers, for the base and for decoder layers of the heads."""
        super().set_experts_implementation(*args, **kwargs)
        self.drafter.follow_base()

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
