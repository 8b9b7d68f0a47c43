"""A draft model: a small language model of the same vocabulary guesses for the base (Leviathan et al., 2023).

It reads nothing of the base but its tokens, from the first one on, and keeps a cache of its own. Each level of a tree
is one forward of it over the level's nodes, which see the verified text and their ancestors.

Shapes: B rows, A newly verified tokens, T positions, n nodes of a level, M nodes of the tree so far, H hidden, V'
vocabulary that both models share, S whatever the logits are made of: H, or V' where these cannot be had apart.
"""

import copy
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.configuration_utils import PreTrainedConfig

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.probe import probe
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.releases import writing_layers
from hf_drafthead.bases.slots import ROOM, SlotCache
from hf_drafthead.generation.state import Guesses, last_valid
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.base_model import HUB_ARGUMENTS, commit_of
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.decoder_layer import next_level
from hf_drafthead.modeling.drafter import Drafter
from hf_drafthead.modeling.files import full_name, refusing
from hf_drafthead.modeling.layers import copy_if_as_wide, llama_like

WithDraftModel = TypeVar("WithDraftModel", bound="DraftModelForCausalLM")

# Distillation: the base's distribution, at the base's own answers.
DRAFT_MODEL_RECIPE: dict[str, Any] = {
    "next_token_weight": 0.0,
    "teacher_weight": 1.0,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.03,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "num_train_epochs": 2,
}
FRESH_LAYERS = 2


class DraftModelConfig(DraftHeadConfig):
    """A draft model, which guesses as deep as a tree is: num_draft_heads is 1.

    Args:
        draft_config: config of the draft model; None: a fresh LLaMA of two layers and the base's other sizes.
        draft_model_name_or_path: where it comes from; a checkpoint, which has its weights, says ids of the Hub alone.
        draft_model_revision: its commit, if it came from the Hub.
    """

    model_type = "drafthead_draft_model"
    any_depth = True

    num_draft_heads: int = 1
    draft_config: dict[str, Any] | PreTrainedConfig | None = None
    draft_model_name_or_path: str | None = None
    draft_model_revision: str | None = None

    @property
    def own_layer(self) -> PreTrainedConfig:
        """What the draft model's text part is configured by."""
        return cast(PreTrainedConfig, self.draft_config).get_text_config(decoder=True)

    @property
    def known_tokens(self) -> int | None:
        return super().known_tokens if self.draft_config is None else self.shared_vocabulary

    @property
    def shared_vocabulary(self) -> int:
        """V', tokens that both models score: sizes may differ by the padding of one family's vocabularies."""
        return min(self.own_layer.vocab_size, self.get_text_config().vocab_size)

    def check(self) -> None:
        super().check()
        self._check_single_head("a draft model guesses")
        if self.draft_config is None and isinstance(self.base_config, PreTrainedConfig):
            self.draft_config = llama_like(self.get_text_config(), FRESH_LAYERS)
        if isinstance(self.draft_config, PreTrainedConfig) and self.draft_config.is_encoder_decoder:
            raise ValueError(
                f"the draft model is an encoder-decoder ({self.draft_config.model_type!r}): it cannot go on from the "
                "base's text, give a causal language model."
            )


class DraftModelState(NamedTuple):
    """The verified text, and where in a tree the guessing is.

    cache: of the draft model; scores: (B, S) at each row's root; ancestors: (B, n, M) which nodes of the tree so far
    the last level's nodes see, the last level first; depth: levels that were guessed; over: the draft model has come
    to the end of its positions, and guesses no more in this call.
    """

    cache: SlotCache
    scores: Tensor
    ancestors: Tensor | None = None
    depth: int = 0
    over: bool = False


class DraftModelDrafter(Drafter):
    """A language model and its own cache.

    State dict: `model.*` with the draft model's names; `draft_tokens` (V',) where it scores fewer tokens than the base.
    """

    config: DraftModelConfig
    keeps_history = True
    reads = ()

    def __init__(self, config: DraftModelConfig) -> None:
        super().__init__(config)
        self.model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config.draft_config))
        self._readers: dict[Any, BaseReader] = {}
        self.size = config.shared_vocabulary
        self.chosen = self.draft_tokens is not None
        if not self.chosen and self.size < config.get_text_config().vocab_size:
            self.draft_tokens = torch.arange(self.size)
        self.limit = getattr(config.own_layer, "max_position_embeddings", None)

    def prepare(self) -> None:
        """Find out how the draft model is run; Unsupported if it cannot score a tree."""
        super().prepare()
        _ = self.reader

    @property
    def reader(self) -> BaseReader:
        """How the draft model is run: found out by running it, once for each way to attend and type."""
        key = (self.model.config._attn_implementation, self.model.dtype)
        readers = self._readers
        if key not in readers or readers[key].base is not self.model:
            was_training = self.model.training
            self.model.eval()
            try:
                reader = probe(self.model, ())
                if reader.mixers:
                    raise Unsupported("the base keeps a state, from which a draft model cannot guess level by level")
                readers[key] = reader
            except Unsupported as reason:
                raise Unsupported(
                    f"the draft model cannot draft a tree: {str(reason).replace('the base', 'it')}"
                ) from None
            finally:
                self.model.train(was_training)
        return readers[key]

    @property
    def all_tied_weights_keys(self) -> dict[str, str]:
        """Which weights of the draft model are others of it, as models of transformers say it."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        return {f"model.{target}": f"model.{source}" for target, source in tied.items()}

    def start(self, batch_size: int, capacity: int) -> DraftModelState:
        layers = writing_layers(self.config.own_layer)
        cache = SlotCache(batch_size, layers, min(capacity, ROOM))
        width = self.model.get_output_embeddings().weight.shape[-1] if self.reader.split else self.size
        return DraftModelState(cache, self.placed(torch.zeros(batch_size, width)))

    def observe(self, state: DraftModelState, features: Tensor, tokens: Tensor, lengths: Tensor) -> DraftModelState:
        """Read newly verified tokens; of the prompt all of them, the first one too."""
        cache, device = state.cache, state.scores.device
        tokens, lengths = tokens.to(device), lengths.to(device)
        count = tokens.shape[1]
        if state.over or (not cache.fixed and self.limit is not None and cache.extent + count > self.limit):
            return DraftModelState(cache, state.scores, over=True)
        order = torch.arange(count, device=device)
        if cache.place(count, past=True):
            scores = self._scores(tokens, order.expand_as(tokens), None, cache)
        else:
            scores = self._over_nodes(cache, tokens, order[None], (order <= order[:, None])[None])
        cache.keep(order.expand_as(tokens), lengths)
        return DraftModelState(cache, last_valid(state.scores, scores, lengths))

    def expand(self, state: DraftModelState, tokens: Tensor, parents: Tensor) -> tuple[DraftModelState, Guesses]:
        cache, device = state.cache, state.scores.device
        if state.over:
            return state, Guesses(state.scores.new_zeros(len(tokens), 1, self.choices), self.draft_tokens)
        if state.depth == 0:  # the root was read already
            scores, ancestors = state.scores.unsqueeze(1), None
        else:
            count = tokens.shape[1]
            ancestors = next_level(state.ancestors, parents.to(device)[..., None])
            cache.place(count, again=state.depth > 1)
            depths = torch.full((1, count), state.depth - 1, device=device)
            scores = self._over_nodes(cache, tokens.to(device), depths, ancestors)
        state = DraftModelState(cache, state.scores, ancestors, state.depth + 1, state.over)
        return state, Guesses(self.head_logits(0, scores), self.draft_tokens)

    def head_states(self, features: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        """One entry: what the guess of the token after next is made of, the next one being read."""
        inputs = {"input_ids": self._embeddable(input_ids), "attention_mask": attention_mask, "use_cache": False}
        if attention_mask is not None:
            inputs["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)
        return [self.reader.read(inputs).scores.roll(-1, dims=1)]

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        """Logits (..., V') from what they are made of (..., S)."""
        if not self.chosen:
            return self.reader.logits(hidden)[..., : self.size]
        if not self.reader.split:
            return self.reader.logits(hidden)[..., self.draft_tokens]
        weight, bias = self._rows(self._scored_by(), cast(Tensor, self.draft_tokens), hidden)
        return F.linear(hidden, weight, bias)

    def tables(self) -> list[nn.Embedding]:
        return []

    def _scored_by(self) -> Any:
        return self.model.get_output_embeddings()

    def _over_nodes(self, cache: SlotCache, tokens: Tensor, depths: Tensor, ancestors: Tensor) -> Tensor:
        """What the logits at nodes (B, n), so many positions (1, n) behind the row's past, are made of (B, n, S)."""
        past = cache.lengths[:, None] + depths
        masks = {
            kind: cache.mask(ancestors, depths, self.model.dtype, window)
            for kind, window in self.reader.windows.items()
        }
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        # positions behind the last one are those of a tree that reaches beyond it, or of a step of fixed shapes
        return self._scores(tokens, past if self.limit is None else past.clamp(max=self.limit - 1), mask, cache)

    def _scores(self, tokens: Tensor, positions: Tensor, mask: Any, cache: SlotCache) -> Tensor:
        inputs = {"attention_mask": mask, "position_ids": positions, "use_cache": True, self.reader.cache_name: cache}
        return self.reader.read({"input_ids": self._embeddable(tokens), **inputs}).scores

    def _embeddable(self, tokens: Tensor) -> Tensor:
        """Tokens as the draft model can embed them: those that only pad the base's vocabulary are never written."""
        return tokens.clamp(max=self.config.own_layer.vocab_size - 1)


class DraftModelForCausalLM(DraftHeadPreTrainedModel):
    """A base with a small language model that drafts for it."""

    config_class = DraftModelConfig
    drafter_class = DraftModelDrafter
    drafter: DraftModelDrafter

    @classmethod
    def from_base(
        cls: type[WithDraftModel],
        base: str | os.PathLike | nn.Module,
        *,
        draft: str | os.PathLike | nn.Module | PreTrainedConfig | None = None,
        draft_revision: str | None = None,
        config: DraftHeadConfig | None = None,
        **kwargs: Any,
    ) -> WithDraftModel:
        """A draft model for a base.

        Args:
            base: Hub id or path of a causal language model, or a loaded one (which is used, not copied).
            draft: the same for the draft model; or the config of a fresh one, which has to be trained before it is of
                use. Default: the one that the config names, else a fresh LLaMA of two layers.
            draft_revision: branch, tag or commit of the draft model.
            config: take the family's fields from this config.
            kwargs: as in every family: config fields, `base_revision`, and arguments for loading the base.

        Raises:
            OSError: there is no such base or draft model.
            ValueError: the two have different tokens, or the draft model cannot draft a tree.
        """
        loaded: Any = None
        fields: dict[str, Any] = {}
        named = kwargs.pop("draft_model_name_or_path", getattr(config, "draft_model_name_or_path", None))
        draft = named if draft is None else draft
        fetch = {key: kwargs[key] for key in HUB_ARGUMENTS & set(kwargs)}
        if isinstance(draft, PreTrainedConfig):
            fields["draft_config"] = draft
        elif isinstance(draft, nn.Module):
            loaded = draft
            name = full_name(getattr(loaded.config, "_name_or_path", ""))
            fields = {"draft_config": loaded.config, "draft_model_name_or_path": name or None}
        elif draft is not None:
            name = os.fspath(draft)
            where, advice = (
                {**fetch, "revision": draft_revision or "main"},
                "give the id or path of a small causal language model.",
            )
            with refusing(OSError, f"the draft model {name!r} cannot be loaded", advice, of=(OSError, ValueError)):
                loaded = AutoModelForCausalLM.from_pretrained(name, dtype="auto", **where)
            fields = {"draft_config": loaded.config, "draft_model_name_or_path": full_name(name)}
            fields["draft_model_revision"] = commit_of(name, where)
        model = super().from_base(base, config=config, **fields, **kwargs)
        if loaded is None:
            for find in ("get_input_embeddings", "get_output_embeddings"):
                copy_if_as_wide(getattr(model.drafter.model, find)().weight, getattr(model.base, find)().weight)
        else:
            like = next(model.drafter.parameters())
            if loaded is model.base or loaded.dtype != like.dtype or loaded.device != like.device:
                loaded = copy.deepcopy(loaded).to(device=like.device, dtype=like.dtype)
            model.drafter.model = loaded if model.training else loaded.eval()
            check_token_maps(model.config, fetch)
        try:
            model.drafter.prepare()
        except Unsupported as reason:
            raise ValueError(f"{reason}; give another draft model.") from None
        return model


def check_token_maps(config: Any, fetch: Mapping[str, Any]) -> None:
    """Compare the tokenizers of a base and a draft model id by id, as far as both have tokens; name what differs. Where
    one of them has no tokenizer at hand, as models built in memory, their vocabularies must be of one size."""
    base, draft = config.base_model_name_or_path, config.draft_model_name_or_path
    ours = _tokens(base, config.base_model_revision, fetch)
    theirs = _tokens(draft, config.draft_model_revision, fetch)
    if ours is None or theirs is None:
        sizes = config.get_text_config().vocab_size, config.own_layer.vocab_size
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the base has {sizes[0]} tokens and the draft model {sizes[1]}, and their tokenizers are not at hand "
                "to be compared: give both by name, with their tokenizers, or a draft model of the base's vocabulary."
            )
        return
    for token in sorted(ours.keys() & theirs.keys()):
        if ours[token] != theirs[token]:
            raise ValueError(
                f"the tokenizers of the base {base!r} and the draft model {draft!r} differ: token {token} is "
                f"{ours[token]!r} for the first and {theirs[token]!r} for the second; give a draft model with the "
                "base's tokenizer."
            )


def _tokens(name: str | None, revision: str | None, fetch: Mapping[str, Any]) -> dict[int, str] | None:
    """Every token by its id; None where there is no tokenizer."""
    if not name:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", **fetch)
    except Exception:  # a folder without a tokenizer makes each kind of tokenizer raise in its own way
        return None
    return {token: text for text, token in tokenizer.get_vocab().items()}
