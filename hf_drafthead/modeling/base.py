"""The model that holds a base and its drafter: saving, publishing, and being a model of transformers."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils import logging

from hf_drafthead.bases.releases import CACHE, cache_argument, with_cache
from hf_drafthead.modeling.adapters import (
    ADAPTER_FOLDER,
    active_adapter,
    check_merged_names,
    find_adapter,
    is_of_a_whole_model,
    load_adapter,
    plain_state,
    remove_earlier_adapter,
    save_adapter,
)
from hf_drafthead.modeling.base_model import copy_tokenizer
from hf_drafthead.modeling.checkpoint import remove_earlier_weights, weight_names
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.loading import HUB_ARGUMENTS, LoadableModel
from hf_drafthead.modeling.remote_code import NotCopied

logger = logging.get_logger(__name__)


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
    heads_output: ClassVar[Callable[..., Any] | None] = None  # the loss of a recipe: the package sets it, see there

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        *,
        include_base: bool = False,
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
            include_tokenizer: copy the base's tokenizer, if it is on this machine and the folder has none.
            kwargs: as in transformers (`max_shard_size`, `variant`, `push_to_hub`, ...).

        Raises:
            ValueError: `include_base=True` with a quantized base, or several adapters are active.
        """
        quantizer = getattr(self.base, "hf_quantizer", None)
        unpacked = getattr(getattr(quantizer, "quantization_config", None), "dequantize", False)  # when it was loaded
        if include_base and quantizer is not None and not unpacked:
            raise ValueError(
                f"the base is quantized ({quantizer.quantization_config.quant_method}) and cannot be saved with its "
                "heads: save the heads only, or load the base without quantization_config=."
            )
        publish = kwargs.pop("push_to_hub", False)
        words = ("commit_message", "commit_description", "private", "revision", "create_pr", "tags", "license")
        push_arguments = {name: kwargs.pop(name) for name in ("repo_id", *words) if name in kwargs}
        adapted, adapter = getattr(self, "_hf_peft_config_loaded", False), active_adapter(self.base)
        if (adapted or adapter) and include_base:
            state_dict = plain_state(self, merge=True)
            check_merged_names(state_dict, self._blank(copy.deepcopy(self.config), build_base=True))
        elif adapted:  # adapters of the whole model, heads and all, lie beside the heads
            state_dict = plain_state(self, merge=False)
            if is_main_process:
                save_adapter(self, Path(save_directory))
        elif adapter and is_main_process:
            save_adapter(self.base, Path(save_directory) / ADAPTER_FOLDER)
        tensors = self.state_dict() if state_dict is None else state_dict
        if not include_base:
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("drafter.")}
            kwargs["save_original_format"] = False  # renamings of the base's architecture are not for the heads
        nothing = not tensors and not self.drafter.state_dict()  # a draft model that is named has weights elsewhere
        live, self.config = self.config, self._stored_config(include_base, bool(adapter))
        self._hf_peft_config_loaded = False
        try:
            super().save_pretrained(save_directory, is_main_process=is_main_process, state_dict=tensors, **kwargs)
        finally:
            self.config, self._hf_peft_config_loaded = live, adapted
        if is_main_process:
            if nothing:  # transformers writes no file then, and heads without one are taken for damaged
                save_file({}, Path(save_directory) / weight_names(kwargs.get("variant"))[0], {"format": "pt"})
            remove_earlier_weights(Path(save_directory), kwargs.get("variant"))
            remove_earlier_adapter(Path(save_directory), whole=not adapted, of_base=include_base or not adapter)
            if include_tokenizer:
                self._save_tokenizer(Path(save_directory))
        if publish and is_main_process:
            repo_id = push_arguments.pop("repo_id", None) or os.path.basename(os.path.abspath(save_directory))
            shard = {name: kwargs[name] for name in ("max_shard_size", "token") if name in kwargs}
            self.push_to_hub(repo_id, include_base=include_base, **shard, **push_arguments)

    def _stored_config(self, include_base: bool, with_adapter: bool) -> DraftHeadConfig:
        """The config of a checkpoint with or without the base, and with or without an adapter of the base."""
        stored = copy.deepcopy(self.config)
        stored.base_included = include_base
        if include_base:
            stored.base_gguf_file = None
        if include_base or not with_adapter:
            stored.adapter_name_or_path = stored.adapter_revision = None
        elif not stored.adapter_name_or_path:
            stored.adapter_name_or_path = ADAPTER_FOLDER
        return stored

    def _save_tokenizer(self, folder: Path) -> None:
        """Copy the base's tokenizer, if it is on this machine and the folder has none."""
        name, config = str(getattr(self.base, "name_or_path", "") or ""), self.config
        of_record = name == config.base_model_name_or_path
        hub = {"revision": (of_record and config.base_model_revision) or "main", "local_files_only": True}
        try:
            copy_tokenizer(name, folder, config.base_gguf_file if of_record else None, hub)
        except (OSError, ValueError) as error:
            logger.warning_once(f"the tokenizer of the base is not saved with its heads: {error}")

    def load_adapter(  # type: ignore[override]
        self, peft_model_id: str | os.PathLike, adapter_name: str = "default", **kwargs: Any
    ) -> None:
        """Load an adapter of PEFT; one that was made for the base goes to the base.

        Args:
            peft_model_id: folder or Hub id of the adapter.
            adapter_name: under which the model has it.
            kwargs: of the download, and `adapter_kwargs` with such ones, as in transformers.

        Raises:
            OSError: there is no adapter.
            TypeError: other arguments of transformers' `load_adapter`.
            ValueError: the adapter is not one for this model.
        """
        hub = dict(kwargs.pop("adapter_kwargs", None) or {}) | {
            key: kwargs.pop(key) for key in HUB_ARGUMENTS & set(kwargs)
        }
        if kwargs:
            raise TypeError(
                f"load_adapter was given {', '.join(sorted(kwargs))}: give the adapter, and its name alone."
            )
        folder = find_adapter(os.fspath(peft_model_id), hub)
        if folder is None:
            raise OSError(f"there is no adapter at {os.fspath(peft_model_id)!r}: expected a folder or Hub id of one.")
        load_adapter(self if is_of_a_whole_model(folder) else self.base, folder, adapter_name)

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
        words = (commit_message, commit_description, private, token, revision, create_pr, tags, license, include_base)
        room = _hub_upload()
        return room.push_model(self, room.Target(repo_id, *words, max_shard_size or "50GB")).commit

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
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The base's own forward: the heads take no part in it; but in training mode labels train the heads.

        Then the loss is that of the family's recipe, and the base is only read: a Trainer that knows nothing of draft
        heads trains these. In eval mode the loss is the base's.

        Args:
            training_loss: return `training_loss(model, **kwargs)` instead. A Trainer asks for the heads' loss through
                this, because what wraps a model to distribute it only sees calls of `forward`.
            cache, past_key_values: two names of one argument; the base is given the one that its release knows.
        """
        if training_loss is not None:
            return training_loss(self, **kwargs)
        if labels is not None and self.training:
            if self.heads_output is None:
                raise ImportError("labels train the heads with hf_drafthead: install it, and import it before loading.")
            others = with_cache(CACHE, {"past_key_values": past_key_values, "cache": cache, **kwargs})
            return self.heads_output(
                input_ids, labels, attention_mask, position_ids, inputs_embeds=inputs_embeds, **others
            )
        self._refuse_loss_of_others()
        arguments = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "cache": cache,
            "inputs_embeds": inputs_embeds,
            "labels": labels,
            "logits_to_keep": logits_to_keep,
            **kwargs,
        }
        # Not every base knows every argument: pass on only what was given.
        named = with_cache(cache_argument(self.base.forward) or CACHE, arguments)
        return self.base(**{name: value for name, value in named.items() if value is not None})

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

    @property
    def base_model(self) -> nn.Module:
        """The base without its projection to the vocabulary, which losses that do without logits run by itself."""
        self._refuse_loss_of_others()
        return self if self._modules.get("base") is None else self.base.base_model  # none while it is being built

    def _refuse_loss_of_others(self) -> None:
        """A trainer may put its own forward before ours, and ask for the output of a base that is frozen."""
        wrapped = self.training and "forward" in self.__dict__ and torch.is_grad_enabled()
        if wrapped and not any(parameter.requires_grad for parameter in self.base.parameters()):
            raise ValueError(
                "the trainer computes a loss of its own from the base's output, which teaches the heads nothing: let "
                "the model do it (in an SFTTrainer: compute_loss = Trainer.compute_loss), or use DraftHeadTrainer."
            )

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
        if any(name.endswith("_inv_freq") for name in module._non_persistent_buffers_set - {"original_inv_freq"}):
            computed: Any = type(module)(module.config)  # for each type of layers; transformers leaves them to models
            for name in module._non_persistent_buffers_set:
                init.copy_(getattr(module, name), getattr(computed, name))
        elif any(True for _ in module.buffers(recurse=False)):
            super()._init_weights(module)


def _hub_upload() -> Any:
    """The room that publishes models, which imports this one."""
    from hf_drafthead import hub_upload

    return hub_upload
