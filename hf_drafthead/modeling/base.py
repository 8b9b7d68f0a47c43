"""The model that holds a base and its drafter: saving, publishing, and being a model of transformers."""

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.generators import new_lock
from hf_drafthead.bases.releases import CACHE, cache_argument, with_cache
from hf_drafthead.modeling import adapters
from hf_drafthead.modeling.adapters import adapters_of, altered
from hf_drafthead.modeling.base_model import PLACE_ARGUMENTS, change_of_base, name_base, quantizer_of, replacing
from hf_drafthead.modeling.config import BASE_FOLDER, DraftHeadConfig, HeadsGenerationConfig, portable
from hf_drafthead.modeling.files import WEIGHTS, refusing
from hf_drafthead.modeling.loading import LoadableModel
from hf_drafthead.modeling.publishers import publisher
from hf_drafthead.modeling.remote_code import NotCopied
from hf_drafthead.modeling.resuming import checkpoint_being_resumed, restore_base

SAVING = new_lock(RLock)  # one save at a time replaces files of a folder
SAVES = {"max_shard_size", "token", "save_peft_format", "save_original_format"}  # arguments of transformers' save
SAVES |= {"save_function", "safe_serialization", "use_temp_dir"}  # which callers still hand to it


class DraftHeadPreTrainedModel(NotCopied, LoadableModel):
    """A base model and the draft heads that make its `generate` faster.

    `MedusaForCausalLM(config)` builds both from the config with random weights; `from_base` puts fresh heads on an
    existing base; `from_pretrained` loads trained heads and finds their base.

    Attributes:
        base: the causal language model whose text is reproduced.
        drafter: the heads.
        checkpoint_revision: branch, tag or commit of the Hub that the heads were loaded from.
    """

    # The outer model has no attention of its own: any choice is passed to the base, which knows what it can do.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # each head's loss is a mean over its own labels
    heads_output: ClassVar[Callable[..., Any]]  # the loss of a recipe: the package sets it, see there

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        *,
        include_base: bool | None = None,
        base_model: str | os.PathLike | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the heads, and the name of their base; a base that is not the named one any more lies beside them.

        That is one of which parameters changed or are being trained, that was quantized here, or that has no name: its
        own class saves it in the folder `base`. Adapters of the base lie there, each in a folder of its name.
        Nothing that was in the folder before is removed until its replacement is whole.

        Args:
            save_directory: folder to write to.
            is_main_process: as in transformers.
            state_dict: save these tensors instead of the model's own.
            include_base: whether the base lies beside the heads, whatever was found out about it.
            base_model: the name of the base that others are to load, in the place of the one of this model.
            kwargs: as in transformers (`max_shard_size`, ...).

        Raises:
            ValueError: `include_base=False` without `base_model` for a base that has changed; or its class cannot save
                it.
            OSError: the folder cannot be written.
        """
        if unknown := sorted(name for name in set(kwargs) - SAVES if kwargs.pop(name)):
            advice = "push_to_hub(...) publishes, and a tokenizer is saved by its own save_pretrained(folder)"
            raise TypeError(f"save_pretrained has no argument {unknown[0]}=: leave it out; {advice}.")
        folder, base = Path(save_directory), self._adapted_base()
        with refusing(ValueError, "the heads cannot be saved with their base", of=Unsupported):
            self.drafter.follow_vocabulary()
        of_base = {name[5:]: tensor for name, tensor in (state_dict or {}).items() if name.startswith("base.")}
        change = change_of_base(base, self.config, self._as_loaded, of_base, folder)
        beside = change is not None and base_model is None if include_base is None else include_base
        if change is not None and not beside and base_model is None:
            what = f"which {self.config.base_model_name_or_path!r} does not name any more ({change})"
            raise ValueError(f"include_base=False would lose the base, {what}: leave it out, or give base_model=.")
        state = self.state_dict() if state_dict is None else state_dict
        heads = {name: _plain(tensor) for name, tensor in state.items() if name.startswith("drafter.")}
        nothing = not heads and not self.drafter.state_dict()  # copies alone; transformers' save empties `heads`
        if not heads and not nothing:
            raise ValueError("state_dict= has no tensor of the heads: give names of model.state_dict() (drafter.*).")
        stored = self._stored_config(base, folder, beside, base_model)
        if (uploads := publisher()) is not None:
            _hub_upload().check_saved(stored, folder, uploads)
        with SAVING, replacing(folder, is_main_process) as new:
            if beside:
                shards = {name: kwargs[name] for name in ("max_shard_size",) if name in kwargs}
                _save_base(base, new / BASE_FOLDER, of_base, is_main_process=is_main_process, **shards)
            if stored.base_adapters and is_main_process:
                adapters.save_adapters(base, new / BASE_FOLDER, stored)
            saved: Any = altered(self, config=stored)
            how = {**kwargs, "state_dict": heads, "save_original_format": False}  # renamings are of the base's layers
            super(DraftHeadPreTrainedModel, saved).save_pretrained(new, is_main_process=is_main_process, **how)
            if is_main_process and nothing:  # transformers writes no file then, and heads without one are damaged
                save_file({}, new / WEIGHTS, {"format": "pt"})
        if beside and os.path.realpath(self.config.base_model_name_or_path or "") == os.path.realpath(folder):
            self.config.base_included = True  # its name is now that of the heads

    def train(self, mode: bool = True) -> Any:
        """As in torch; a Trainer that would publish what others cannot load is told so when it begins."""
        if mode and self._modules.get("base") is not None and (uploads := publisher()) is not None:
            being_trained = any(parameter.requires_grad for parameter in self.base.parameters())
            _hub_upload().check_training(self.config, uploads, being_trained or self.config.base_included)
        return super().train(mode)

    def _stored_config(self, base: Any, folder: Path, beside: bool, base_model: Any) -> DraftHeadConfig:
        """The config of a checkpoint in a folder, with the base beside the heads or named, by a new name if given."""
        stored, quantizer = copy.deepcopy(self.config), quantizer_of(base)
        former = stored.base_model_name_or_path
        name = BASE_FOLDER if beside else former if base_model is None else os.fspath(base_model)
        here = quantizer is not None and not quantizer.pre_quantized and name == former
        stored.base_quantization = quantizer.quantization_config.to_dict() if here else None
        stored.base_adapters = adapters_of(base) or None
        stored.check()  # before anything is written: names of adapters are those of folders
        if name != former or stored.base_included:
            name_base(stored, folder, {"base_model_name_or_path": name})
        stored.base_model_name_or_path, stored.base_included = portable(name, folder), beside
        return stored

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As in torch; a Trainer that goes on from a checkpoint gets its base back as well, where it was saved."""
        result = super().load_state_dict(state_dict, strict, assign)
        whole = any(name.startswith("base.") for name in state_dict)
        if not whole and (folder := checkpoint_being_resumed()) is not None:
            restore_base(self, folder)
        return result

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """As in torch; PEFT, which looks for layers to adapt by the ends of their names, is shown none of the heads."""
        by_peft = str(sys._getframe(1).f_globals.get("__name__")).startswith("peft.")
        for name, module in super().named_modules(*args, **kwargs):
            if not by_peft or name.partition(".")[0] != "drafter":
                yield name, module

    def load_adapter(  # type: ignore[override]
        self, peft_model_id: str | os.PathLike, adapter_name: str = "default", **kwargs: Any
    ) -> None:
        """Load an adapter of PEFT onto the base, from its folder or Hub id.

        Args:
            kwargs: of the download, `adapter_kwargs` with such ones, and `is_trainable`, as in transformers.

        Raises:
            OSError: there is no adapter.
            ValueError: the adapter is not one for this model, or the base has one of this name.
        """
        trainable = bool(kwargs.pop("is_trainable", False))
        hub, path = dict(kwargs.pop("adapter_kwargs", None) or {}) | kwargs, os.fspath(peft_model_id)
        if unknown := set(hub) - PLACE_ARGUMENTS:
            raise TypeError(f"load_adapter was given {min(unknown)}: give the adapter, and its name alone.")
        if (folder := adapters.find_adapter(path, hub)) is None:
            raise OSError(f"there is no adapter at {path!r}: expected a folder or Hub id of one.")
        base = self._adapted_base()
        if adapter_name in adapters_of(base):
            raise ValueError(f"the base has an adapter {adapter_name!r} already: give the new one another name.")
        adapters.load_adapter(base, folder, adapter_name, trainable)

    def add_adapter(self, adapter_config: Any, adapter_name: str = "default") -> None:
        """Put a new adapter of a PEFT config on the base."""
        adapters.add_adapter(self._adapted_base(), adapter_config, adapter_name)

    def _adapted_base(self) -> Any:
        """The base, which knows of the adapters in its layers, also of those that came by way of this model."""
        base = adapters.unwrapped(self.base)
        if adapters.plain(base) is base:
            base.__dict__.pop("peft_config", None)
            base._hf_peft_config_loaded = False
        elif not hasattr(base, "peft_config"):
            base.peft_config, base._hf_peft_config_loaded = self.peft_config, True
        self._hf_peft_config_loaded = False
        return base

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:  # type: ignore[override]
        """Publish the heads, with tokenizer, settings, figures and card, in one commit.

        Args:
            repo_id: `org/name` on the Hub; made if it is not there.
            options: as in transformers, `commit_message`, `commit_description`, `private`, `token`, `revision`,
                `create_pr`, `max_shard_size`, `tags`; `include_base`, whether the base is published beside the heads
                (by default, where it is not the named one); `license` of the heads, as the Hub names it (`apache-2.0`),
                if no card or summary says it yet.

        Returns:
            The commit, as `huggingface_hub.CommitInfo`.

        Raises:
            OSError: the Hub refuses, or cannot be reached.
            ValueError: others could not use these heads: their base is a local path, a tensor is not finite, the card
                is not complete.
        """
        room = _hub_upload()
        if unknown := options.keys() - room.Target.__dataclass_fields__:
            raise TypeError(f"push_to_hub has no argument {min(unknown)}=: leave it out.")
        return room.push_model(self, room.Target(repo_id, **options)).commit

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor | None = None,
        training_loss: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The base's own forward: the heads take no part in it; but in training mode labels train the heads.

        Then the loss is that of the family's recipe, and the base is only read: a Trainer that knows nothing of draft
        heads trains these. In eval mode the loss is the base's.

        Args:
            training_loss: return `training_loss(model, **kwargs)` instead. A Trainer asks for the heads' loss through
                this, because what wraps a model to distribute it only sees calls of `forward`.
            past_key_values: or `cache`; the base is given the name that its release knows.
        """
        if training_loss is not None:
            return training_loss(self, **kwargs)
        arguments = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "labels": labels,
            "logits_to_keep": logits_to_keep,
            **kwargs,
        }
        if labels is not None and self.training:
            return self.heads_output(**with_cache(CACHE, arguments))
        self._refuse_loss_of_others()
        # Not every base knows every argument: pass on only what was given.
        named = with_cache(cache_argument(self.base.forward) or CACHE, arguments)
        return self.base(**{name: value for name, value in named.items() if value is not None})

    @classmethod
    def can_generate(cls) -> bool:
        """Always."""
        return True

    @property
    def base_model(self) -> nn.Module:
        """The base without its projection to the vocabulary, which losses that do without logits run by itself."""
        self._refuse_loss_of_others()
        return self if self._modules.get("base") is None else self.base.base_model  # none while it is being built

    def learn_from(self, prompts: Any, answers: Any, **settings: Any) -> dict[str, float]:
        """Let the heads learn from texts that the base has just written, such as rollouts; the base is left alone.

        Their weights change where that raises the tokens per step on texts that are held out. The newest texts of
        earlier calls are remembered. A base may change between two calls, as one that is trained does.

        Args:
            prompts, answers: token ids of each, without padding.
            settings: of `learning.Learner`; other ones than in earlier calls begin anew, without their texts.

        Returns:
            rounds of learning, how many were taken over, tokens per step before the first one and now.

        Raises:
            ValueError: these heads cannot learn here, in one line.
        """
        return dict(_learning().learn_from(self, prompts, answers, **settings))

    def _refuse_loss_of_others(self) -> None:
        """A trainer may put its own forward before ours, and ask for the output of a base that is frozen."""
        wrapped = self.training and "forward" in self.__dict__ and torch.is_grad_enabled()
        if wrapped and not any(parameter.requires_grad for parameter in self.base.parameters()):
            what = "the trainer computes a loss of its own from the base's output, which teaches the heads nothing"
            advice = "(in an SFTTrainer: compute_loss = Trainer.compute_loss), or use DraftHeadTrainer"
            raise ValueError(f"{what}: let the model do it {advice}.")

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers, for the base and for decoder layers of the heads."""
        super().set_attn_implementation(*args, **kwargs)
        self.drafter.follow_base()

    def set_experts_implementation(self, *args: Any, **kwargs: Any) -> None:
        super().set_experts_implementation(*args, **kwargs)
        self.drafter.follow_base()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As in transformers, of the base; the heads go on guessing among the tokens that they know."""
        embeddings: nn.Module = self.base.resize_token_embeddings(*args, **kwargs)
        with suppress(Unsupported):  # said where they are asked to guess, or saved
            self.drafter.follow_vocabulary()
        return embeddings


def _save_base(base: Any, folder: Path, state: dict[str, Tensor], **how: Any) -> None:
    """Write a base, without its adapters, into a folder by its own class."""
    quantizer, alone = quantizer_of(base), adapters.plain(base)
    if getattr(quantizer, "pre_quantized", False):
        how["save_original_format"] = False  # transformers cannot undo what it did to those of bitsandbytes
    if alone is base and state:  # else by names of adapted layers
        how["state_dict"] = state
    config = HeadsGenerationConfig.of(alone.generation_config)  # older versions refuse what they warn of otherwise
    told_of_none = altered(alone, hf_quantizer=quantizer, _hf_peft_config_loaded=False, generation_config=config)
    advice = "save it yourself, and name it (include_base=False, base_model=)."
    with refusing(ValueError, "the base cannot be saved beside its heads", advice, but=OSError):
        told_of_none.save_pretrained(folder, **how)


def _plain(tensor: Tensor) -> Tensor:
    """An ordinary tensor with the values of one that a quantizer has put into a form of its own."""
    ordinary = type(tensor) in (Tensor, nn.Parameter) or not hasattr(tensor, "dequantize")
    return tensor if ordinary else tensor.dequantize()


def _on_base(name: str, base_of: Callable[[Any], Any]) -> Any:
    def method(model: DraftHeadPreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return getattr(base_of(model), name)(*args, **kwargs)

    method.__doc__ = f"As in transformers: `{name}` of the base."
    return method


OF_ADAPTERS = ["set_adapter", "enable_adapters", "disable_adapters", "active_adapters", "delete_adapter"]
OF_ADAPTERS += ["get_adapter_state_dict", "enable_peft_hotswap"]
OF_EMBEDDINGS = [f"{verb}_{side}put_embeddings" for verb in ("get", "set") for side in ("in", "out")]
for _name in OF_ADAPTERS:
    setattr(DraftHeadPreTrainedModel, _name, _on_base(_name, DraftHeadPreTrainedModel._adapted_base))
for _name in (*OF_EMBEDDINGS, "get_decoder"):
    setattr(DraftHeadPreTrainedModel, _name, _on_base(_name, lambda model: model.base))


def _learning() -> Any:
    """The room in which heads learn, which imports this one."""
    from hf_drafthead import learning

    return learning


def _hub_upload() -> Any:
    """The room that publishes models, which imports this one."""
    from hf_drafthead import hub_upload

    return hub_upload
