"""MTP: the modules for multi-token prediction that a base was trained with (DeepSeek-AI, 2024, section 2.2).

    verified pair   x = W [N_e(E(x_{t+1})); N_h(h_t)]   h: the base's hidden state after its final norm
    node            x = W [N_e(E(token)); N_h(s)]       s: the output at the parent, after the output norm
    scores          lm_head(s),  s = N_o(block(x))      of the token behind

The block is a decoder layer of the base's own kind. One module is used at every level of a tree, as EAGLE's layer is.
Of several, module d guesses at level d: it reads what module d - 1 made of the position before, and has keys and values
of its own over the whole text.

Shapes: B rows, A newly verified positions, T positions, n nodes of a level, M nodes of the tree so far, K modules,
H hidden, V vocabulary, D draft vocabulary.
"""

import contextlib
import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from hf_drafthead.bases.slots import ROOM, SlotCache
from hf_drafthead.generation.state import Guesses, last_valid
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.base_model import HUB_ARGUMENTS, split_gguf
from hf_drafthead.modeling.config import MAX_LAYERS, DraftHeadConfig
from hf_drafthead.modeling.decoder_layer import (
    ChainKeys,
    DecoderLayer,
    final_norm,
    has_layers,
    last_layer_config,
    next_level,
    types_of,
    windows_of,
)
from hf_drafthead.modeling.drafter import Drafter
from hf_drafthead.modeling.files import is_missing_folder, read_ranking
from hf_drafthead.modeling.layers import copy_if_as_wide
from hf_drafthead.modeling.loading import _formats, check_tensors

logger = logging.get_logger(__name__)

LARGE_VOCABULARY, USUAL_VOCABULARY = 100_000, 32_000  # tokens of a base; and of them those that are guessed among
FLAGS = ("hidden_first", "output_norm", "own_lm_heads")  # fields that are as the base's architecture has it if None
# Fields of configs that count modules, under the names of several projects.
COUNTS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class MtpKind:
    """How the modules of a base's architecture differ from DeepSeek-V3's.

    Attributes:
        hidden_first: W reads [hidden; embedding].
        output_norm: there is a norm behind the block.
        own_lm_heads: every module has a lm_head of its own.
        block: config fields of the block, where it is not like the base's last layer with full attention.
        model_type: of a model whose layer the block is, of the sizes of the base's.
        rotary: the block's attention has rotary positions.
    """

    hidden_first: bool = False
    output_norm: bool = True
    own_lm_heads: bool = False
    block: tuple[tuple[str, Any], ...] = ()
    model_type: str | None = None
    rotary: bool = True


SLIDING: tuple[tuple[str, Any], ...] = (("layer_types", ["sliding_attention"]),)
DENSE: tuple[tuple[str, Any], ...] = (("mlp_layer_types", ["dense"]),)
# By model_type of the base's text config; those that are missing are as DeepSeek-V3's.
MTP_KINDS = {
    "mimo": MtpKind(hidden_first=True),
    "nemotron_h": MtpKind(rotary=False),
    "longcat_flash": MtpKind(block=(("first_k_dense_replace", 1),), model_type="deepseek_v3"),
    "ernie4_5_moe": MtpKind(output_norm=False, block=(("moe_layer_start_index", 1), ("moe_layer_end_index", 1))),
    "mellum": MtpKind(block=SLIDING),
    "mimo_v2_flash": MtpKind(block=SLIDING + DENSE),
    "step3p7": MtpKind(own_lm_heads=True),
    "step3p5": MtpKind(own_lm_heads=True),
}


class MtpConfig(DraftHeadConfig):
    """The modules for multi-token prediction of a base; what is None is as the base's architecture has it.

    Args:
        num_draft_heads: levels that training unrolls; of several modules, as many as these.
        num_modules: K; None for as many as the base's config counts, or 1. One guesses at every depth, several as many
            levels as they are.
        hidden_first: the joining layer reads [hidden; embedding].
        output_norm: norm the block's output before the lm_head reads it.
        feed_normed: go on from the normed output, as in DeepSeek, GLM and Qwen; False: from the block's own. Which of
            them a module was trained with shows in how many of its guesses are right from the second level on.
        own_lm_heads: a lm_head for each module in the place of the base's.
        own_embeddings: embeddings of the modules' own in the place of the base's.
        layer_config: whose decoder layer the block is; None for the base's own kind.
    """

    model_type = "drafthead_mtp"

    num_draft_heads: int = 3
    num_modules: int | None = None
    hidden_first: bool | None = None
    output_norm: bool | None = None
    feed_normed: bool = True
    own_lm_heads: bool | None = None
    own_embeddings: bool = False
    layer_config: dict[str, Any] | PreTrainedConfig | None = None

    @property
    def max_depth(self) -> int | None:
        return None if self.num_modules in (None, 1) else self.num_modules

    @property
    def wants_fewer_tokens(self) -> bool:
        """The lm_head of a base with many tokens costs several times what a module does."""
        return (self.known_tokens or 0) > LARGE_VOCABULARY

    def check(self) -> None:
        """Fill in what is to be as the base's architecture has it, once that is known; refuse what cannot be built."""
        if isinstance(self.base_config, PreTrainedConfig):
            text = self.get_text_config()
            kind = MTP_KINDS.get(text.model_type, MtpKind())
            for name in FLAGS:
                if getattr(self, name) is None:
                    setattr(self, name, getattr(kind, name))
            if self.num_modules is None:
                self.num_modules = max(modules_counted(text), 1)
            with contextlib.suppress(AttributeError):  # of kinds of layers that follow from other fields
                self.layer_config = self.layer_config or own_block(text, kind)
        if self.num_modules is not None:
            self._check_count("num_modules", 1, MAX_LAYERS)
            self.num_draft_heads = self.num_draft_heads if self.num_modules == 1 else self.num_modules
        super().check()
        self._check_layer("an MTP module is a decoder layer", True)


def modules_counted(text: PreTrainedConfig) -> int:
    """How many modules a base's text config says that there are."""
    counts = (getattr(text, name, None) for name in COUNTS)
    return next((count for count in counts if type(count) is int), 0)


def own_block(text: PreTrainedConfig, kind: MtpKind) -> PreTrainedConfig | None:
    """The config of the block of a base's modules; None if it is of no form that is known here."""
    block = last_layer_config(text, dict(kind.block), kind.model_type)
    types = types_of(block)
    if not kind.rotary and not (modules_counted(text) and len(types) > 1 and [*types] == block.layer_types):
        return None  # a Nemotron's config names the layers of modules even where it has none
    return block if has_layers(block, types, kind.rotary) else None


class MtpModule(nn.Module):
    """One module: an embedding and a hidden state are normed, joined, and go through a decoder layer.

    Module i is the one with the first i positions before the text.
    """

    def __init__(self, config: MtpConfig, index: int, choices: int) -> None:
        super().__init__()
        self.hidden_first, width = config.hidden_first, config.width
        (window,), types = windows_of(config.own_layer, 1), types_of(config.own_layer)
        how: dict[str, Any] = {"window": window, "layer_types": types, "first": index}
        rotary = MTP_KINDS.get(config.own_layer.model_type, MtpKind()).rotary
        body = DecoderLayer(config.own_layer, ends_with_norm=True, rotary=rotary, **how)
        norm = nn.RMSNorm(width, eps=1e-6) if isinstance(body.norm, nn.Identity) else body.norm
        self.embedding_norm, self.hidden_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.body, body.norm = body, nn.Identity()
        self.norm = norm if config.output_norm else nn.Identity()
        self.lm_head = nn.Linear(width, choices, bias=False) if config.own_lm_heads else None

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """What the block reads (..., H) of hidden states and of embeddings of the tokens that follow them."""
        pair = [self.embedding_norm(embeddings), self.hidden_norm(hidden)]
        return self.fc(torch.cat(pair[::-1] if self.hidden_first else pair, dim=-1))


class MtpState(NamedTuple):
    """The verified text, and the tree level that was guessed last."""

    caches: tuple[SlotCache, ...]  # of each module
    last: tuple[Tensor, ...]  # (B, H) each block's output at each row's last verified position
    level: tuple[Tensor, ...]  # (B, n, H) the outputs at the last level, of the module that guessed and those behind it
    ancestors: Tensor | None  # (B, n, M) which nodes of the tree so far these see, the last level first
    depths: Tensor  # (M,) of these nodes, the root's children having 1
    depth: int = 0


class MtpDrafter(Drafter):
    """The base's own modules.

    State dict: for each module `mtp.{i}.` and `embedding_norm`, `hidden_norm`, `norm` (H), `fc.weight` (H, 2H) and
    `body.layer.*` with the base's names; by config no `norm`, `lm_head.weight` (D, H) and `embed_tokens.weight` (V, H).
    """

    config: MtpConfig
    keeps_history = True
    asked_by = "use_mtp"
    needs_range = True

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        count = config.num_modules or 1
        self.mtp = nn.ModuleList(MtpModule(config, index, self.choices) for index in range(count))
        vocabulary = config.get_text_config().vocab_size
        self.embed_tokens = nn.Embedding(vocabulary, config.width) if config.own_embeddings else None

    def copy_from_base(self) -> None:
        """The output norm of the base, and its embeddings and lm_head where the modules have some of their own."""
        super().copy_from_base()
        final = getattr(final_norm(self.base.get_decoder()), "weight", None)
        for module in self._modules_of():
            if final is not None and (weight := getattr(module.norm, "weight", None)) is not None:
                copy_if_as_wide(weight, final)

    def lm_heads(self) -> list[nn.Linear]:
        return [module.lm_head for module in self._modules_of() if module.lm_head is not None]

    def start(self, batch_size: int, capacity: int) -> MtpState:
        modules = self._modules_of()
        nothing = self.placed(torch.zeros(batch_size, self.config.own_layer.hidden_size))
        caches = tuple(SlotCache(batch_size, 1, min(capacity, ROOM)) for _ in modules)
        return self._grown(caches, tuple(nothing.clone() for _ in modules))

    def observe(self, state: MtpState, features: Tensor, tokens: Tensor, lengths: Tensor) -> MtpState:
        fed, last = self.placed(features), []
        embeddings = self.embed(tokens, like=fed)
        for module, cache, before in zip(self._modules_of(), state.caches, state.last, strict=True):
            out = module.body.over_verified(cache, module(fed, embeddings), lengths)
            last.append(last_valid(before, out, lengths))
            # the next module reads the output of the position before, with the same token
            fed = self._fed_back(module, torch.cat([before.unsqueeze(1), out[:, :-1]], dim=1))
        return self._grown(state.caches, tuple(last))

    def expand(self, state: MtpState, tokens: Tensor, parents: Tensor) -> tuple[MtpState, Guesses]:
        level, ancestors, depths, modules = state.level, state.ancestors, state.depths, self._modules_of()
        if state.depth:  # the root's own pairs were observed already
            parents = parents.to(depths.device)[..., None]
            ancestors = next_level(ancestors, parents)
            embeddings, next_outputs = self.embed(tokens, like=level[0]), []
            depths = torch.cat([depths.new_full((tokens.shape[1],), state.depth), depths])
            first = state.depth if len(modules) > 1 else 0
            readers = zip(modules[first:], state.caches[first:], modules[max(first - 1, 0) :], level)
            for module, cache, before, outputs in readers:
                x = module(self._fed_back(before, outputs.take_along_dim(parents, dim=1)), embeddings)
                seen = ancestors
                if module.body.first:  # behind a short text its positions may lie before the text: these are not seen
                    early = cache.lengths[:, None] + depths - 1 < module.body.first
                    seen = ancestors & (~early[:, None] | early[:, :1, None])
                next_outputs.append(module.body.over_nodes(cache, x, state.depth, seen))
            level = tuple(next_outputs)
        state = MtpState(state.caches, state.last, level, ancestors, depths, state.depth + 1)
        return state, Guesses(self.head_logits(state.depth - 1, level[0]), self.draft_tokens)

    def head_states(self, features: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        """Entry k is guess k of chains that begin at every position and read the true tokens.

        One module goes on from its own output, as in a tree: a chain sees the text up to its beginning and itself.
        """
        modules, states, fed, chains = self._modules_of(), [], features, ChainKeys({})
        for step in range(self.config.num_draft_heads):
            module = modules[step % len(modules)]
            x = module(fed, self.embed(input_ids.roll(-1 - step, dims=1), like=fed))
            if len(modules) > 1:
                states.append(module.body.over_text(x, attention_mask))
            else:
                states.append(module.body.over_chains(chains, x, step, attention_mask))
            fed = self._fed_back(module, states[-1])
        return states

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        modules = self._modules_of()
        module = modules[head % len(modules)]
        normed = module.norm(hidden)
        return self.base_logits(normed) if module.lm_head is None else module.lm_head(normed)

    def _modules_of(self) -> list[Any]:
        return list(cast(Any, self.mtp))

    def _fed_back(self, module: MtpModule, out: Tensor) -> Tensor:
        """What a module, or the next one, reads of an output (..., H) in the place of the base's hidden state."""
        return module.norm(out) if self.config.feed_normed else out

    def _grown(self, caches: tuple[SlotCache, ...], last: tuple[Tensor, ...]) -> MtpState:
        """The state at a tree's root, of which no node is in a cache."""
        depths = torch.zeros(0, dtype=torch.long, device=last[0].device)
        return MtpState(caches, last, tuple(out.unsqueeze(1) for out in last), None, depths)


class MtpForCausalLM(DraftHeadPreTrainedModel):
    """A base with its own modules for multi-token prediction."""

    config_class = MtpConfig
    drafter_class = MtpDrafter

    @classmethod
    def from_base(  # type: ignore[override]
        cls,
        base: str | os.PathLike | nn.Module,
        *,
        modules_from: str | os.PathLike | Literal[False] | None = None,
        draft_tokens: str | os.PathLike | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> "MtpForCausalLM":
        """The base with the modules that its own repository holds, or with fresh ones where it never had any.

        Args:
            base: as for other families.
            modules_from: folder or Hub id that holds the modules, if the base's own has lost them (a merge, quantized
                weights, `save_pretrained`); False for fresh modules to train.
            draft_tokens: ids of tokens, the most frequent first, of which the first `draft_vocab_size` (by default
                32000) are guessed among; or a JSON file that holds them, as `hf-drafthead vocabulary` writes it.
            kwargs: as for other families.

        Raises:
            OSError: there is no such base, or a file cannot be read.
            ValueError: the config counts modules that the files lack, the modules are of a form or in a type that is
                not known here, or as for other families.
        """
        if modules_from is True or not isinstance(modules_from, str | os.PathLike | None | bool):
            raise ValueError(f"modules_from is {modules_from!r}: expected a folder, a Hub id, or False for fresh ones.")
        if modules_from and is_missing_folder(split_gguf(os.fspath(modules_from))[0]):
            raise OSError(f"there is no folder {os.fspath(modules_from)!r}: name one that holds the base's modules.")
        hub = {name: kwargs[name] for name in HUB_ARGUMENTS & set(kwargs)}
        ranking = None if draft_tokens is None else read_ranking(draft_tokens)
        if ranking is not None and kwargs.get("draft_vocab_size") is None:
            kwargs["draft_vocab_size"] = min(USUAL_VOCABULARY, len(ranking))
        model = super().from_base(base, **kwargs)
        if ranking is not None:
            model.drafter.choose_vocabulary(torch.tensor(ranking[: model.config.draft_vocab_size]))
        of_base, revision = model.config.base_model_name_or_path, model.config.base_model_revision
        if modules_from is not False and (named := modules_from or of_base):
            revision = revision if named == of_base else None
            model = model._with_modules(os.fspath(named), {**hub, "revision": revision or "main"}, bool(modules_from))
        if model.config.wants_fewer_tokens and model.config.draft_vocab_size is None:
            logger.warning_once(
                f"the modules guess among all {model.config.known_tokens:,} tokens of the base, which costs "
                "more than the modules themselves: give the frequent ones with draft_tokens=, a JSON file of ids that "
                "`hf-drafthead vocabulary` writes."
            )
        return model

    def _with_modules(self, place: str, hub: dict[str, Any], required: bool) -> "MtpForCausalLM":
        """This model with the modules that lie in a repository; it stays as it is where the base never had any."""
        config = self.config
        stored = _formats().own_modules(config, self.base, place, hub, required)
        if stored is None:
            logger.warning_once(
                f"{place!r} has no modules for multi-token prediction: these are untrained, train them with "
                "`hf-drafthead train --family mtp`."
            )
            return self
        fields, tensors = stored
        model: MtpForCausalLM = self
        if any(getattr(config, name) != value for name, value in fields.items()):
            heads_fields = {name: getattr(config, name) for name in config.heads_fields()}
            about = {name: getattr(config, name) for name in ("base_model_name_or_path", "base_model_revision")}
            model = super().from_base(self.base, **{**heads_fields, **about, **fields})
            if self.drafter.draft_tokens is not None:
                cast(Tensor, model.drafter.draft_tokens).copy_(self.drafter.draft_tokens)
        drafter = model.drafter
        if drafter.draft_tokens is not None:
            for name in [name for name in tensors if name.endswith("lm_head.weight")]:
                tensors[name] = tensors[name][drafter.draft_tokens.cpu()]
            tensors["draft_tokens"] = drafter.draft_tokens
        check_tensors(place, tensors, drafter.state_dict())
        drafter.load_state_dict(tensors)
        drafter.loaded = True
        return model
