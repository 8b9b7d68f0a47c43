"""The drafter contract, for every family: it drafts as it was trained, row by row, and state stays in the state.

Shapes: B rows, T positions, H hidden, V vocabulary.
"""

import copy
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_drafthead.bases import slots
from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.modeling import EagleForCausalLM
from hf_drafthead.modeling.decoder_layer import DecoderLayer
from tests.bases import VOCABULARY, tiny_base
from tests.families import Family, feature_size

EXACT = {"atol": 1e-10, "rtol": 1e-10}


@pytest.fixture
def drafter(family):
    return family.build(tiny_base("llama-gqa")).drafter


def text_and_features(drafter, rows: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(B, T) tokens and (B, T, F*H) features; random ones do, for heads know no base."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    return ids, torch.randn(rows, length, feature_size(drafter), generator=generator, dtype=torch.float64)


def observed(drafter, features: Tensor, ids: Tensor, ends: list[list[int]], capacity: int = 64):
    """The state after the rows of a text were verified in steps: ends[s][b] = how far row b is after step s.

    The unused positions of a step are filled with noise.
    """
    rows = ids.shape[0]
    # a model that reads nothing of the base is told every token, the first one too
    state, at = drafter.start(rows, capacity), [0 if drafter.reads else -1] * rows
    for step in ends:
        lengths = [end - start for start, end in zip(at, step, strict=True)]
        width = max(1, *lengths)
        noise = torch.Generator().manual_seed(width)
        piece = torch.randn(rows, width, features.shape[-1], generator=noise, dtype=features.dtype)
        follow = torch.randint(0, VOCABULARY, (rows, width), generator=noise)
        for row, (start, end) in enumerate(zip(at, step, strict=True)):
            if drafter.reads:
                piece[row, : end - start] = features[row, start:end]
            follow[row, : end - start] = ids[row, start + 1 : end + 1]
        state = drafter.observe(state, piece, follow, torch.tensor(lengths))
        at = step
    return state


def chain(drafter, state, ids: Tensor, at: list[int], levels: int) -> list[Tensor]:
    """Logits (B, V) of each level along the text itself: row b's root is the token at at[b]."""
    found = []
    for level in range(levels):
        tokens = torch.stack([ids[row, start + level] for row, start in enumerate(at)]).unsqueeze(1)
        state, guesses = drafter.expand(state, tokens, torch.zeros_like(tokens))
        found.append(guesses.logits[:, 0])
    return found


def depth_of(drafter) -> int:
    return drafter.max_depth or 4


STEPS = {
    "prompt": [[7, 7, 7]],
    "one by one": [[step] * 3 for step in range(1, 8)],
    "ragged": [[4, 2, 6], [6, 3, 6], [6, 6, 7], [7, 6, 9]],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@torch.inference_mode()
def test_it_drafts_as_it_was_trained(drafter, steps):
    ids, features = text_and_features(drafter, 3, 16)
    ends = steps[-1]
    trained = drafter.head_states(features, ids)
    drafted = chain(drafter, observed(drafter, features, ids, steps), ids, ends, len(trained))
    for level, logits in enumerate(drafted):
        for row, end in enumerate(ends):
            expected = drafter.head_logits(level, trained[level][row, end - 1])
            torch.testing.assert_close(logits[row], expected, **EXACT)


@pytest.fixture(params=[True, False], ids=["as on a CPU", "as on a GPU"])
def reads_back(request):
    """Whether drafters' caches look at their lengths in every step, or go by a bound."""
    if request.param:
        yield
        return
    keep = SlotCache.keep

    def by_bound(cache, nodes, counts):
        bound = cache.extent + nodes.shape[1]
        keep(cache, nodes, counts)
        cache.extent = bound

    with mock.patch.object(SlotCache, "keep", by_bound):
        yield


@pytest.mark.usefixtures("reads_back")
@pytest.mark.parametrize("capacity, room", [(1000, 1024), (3, 1)], ids=["enough", "too little"])
@given(data=st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@torch.inference_mode()
def test_it_remembers_every_step_right(family, capacity, room, data):
    """After any steps, ragged and with rows that stand still, it drafts as from the whole text at once."""
    drafter = family.build(tiny_base("llama-gqa")).drafter
    rows = data.draw(st.integers(1, 3), label="rows")
    ids, features = text_and_features(drafter, rows, 40, seed=data.draw(st.integers(0, 5), label="seed"))
    ends = [[data.draw(st.integers(1, 12)) for _ in range(rows)]]
    for _ in range(data.draw(st.integers(0, 5), label="steps")):
        ends.append([end + data.draw(st.integers(0, 4)) for end in ends[-1]])
    with mock.patch.object(slots, "ROOM", room):
        state = observed(drafter, features, ids, ends, capacity)
    trained = drafter.head_states(features, ids)
    for level, logits in enumerate(chain(drafter, state, ids, ends[-1], len(trained))):
        for row, end in enumerate(ends[-1]):
            expected = drafter.head_logits(level, trained[level][row, end - 1])
            torch.testing.assert_close(logits[row], expected, **EXACT)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.inference_mode()
def test_padding_changes_nothing_for_the_text(drafter, side):
    ids, features = text_and_features(drafter, 2, 12)
    mask = torch.ones_like(ids)
    padded = slice(0, 3) if side == "left" else slice(9, 12)
    mask[1, padded] = 0
    real = mask[1].bool()
    states = drafter.head_states(features, ids, mask)
    alone = drafter.head_states(features[1:, real], ids[1:, real])
    for i, (ours, theirs) in enumerate(zip(states, alone, strict=True)):
        count = 12 - 3 - 1 - i  # the rolled tokens at the end are not the same ones
        torch.testing.assert_close(ours[1, real][:count], theirs[0, :count], **EXACT)
        torch.testing.assert_close(ours[0], drafter.head_states(features[:1], ids[:1])[i][0], **EXACT)


@torch.inference_mode()
def test_a_row_drafts_in_a_batch_as_it_does_alone(drafter):
    ids, features = text_and_features(drafter, 3, 16)
    steps = STEPS["ragged"]
    together = chain(drafter, observed(drafter, features, ids, steps), ids, steps[-1], depth_of(drafter))
    for row in range(3):
        own = [[step[row]] for step in steps]
        mine = slice(row, row + 1)
        state = observed(drafter, features[mine], ids[mine], own)
        alone = chain(drafter, state, ids[mine], own[-1], depth_of(drafter))
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(ours[row], theirs[0], **EXACT)


@pytest.mark.usefixtures("reads_back")
@torch.inference_mode()
def test_the_nodes_of_a_level_are_drafted_as_each_would_be_alone(drafter):
    ids, features = text_and_features(drafter, 2, 8)
    state = observed(drafter, features, ids, [[5, 3]])
    generator = torch.Generator().manual_seed(1)
    widths, depth = [1, 3, 4, 2], depth_of(drafter)
    tokens = [torch.randint(3, VOCABULARY, (2, width), generator=generator) for width in widths[:depth]]
    parents = [torch.zeros(2, 1, dtype=torch.long)]
    parents += [torch.randint(0, w, (2, n), generator=generator) for w, n in zip(widths, widths[1:depth], strict=False)]
    tree, levels = copy.deepcopy(state), []
    for level_tokens, level_parents in zip(tokens, parents, strict=True):
        tree, guesses = drafter.expand(tree, level_tokens, level_parents)
        levels.append(guesses.logits.expand(-1, level_tokens.shape[1], -1))
    for depth, width in enumerate(widths[: len(levels)]):
        for node in range(width):
            path, at = [], torch.full((2,), node)
            for level in range(depth, -1, -1):
                path.insert(0, tokens[level].gather(1, at.unsqueeze(1)))
                at = parents[level].gather(1, at.unsqueeze(1)).squeeze(1)
            alone = copy.deepcopy(state)
            for token in path:
                alone, guesses = drafter.expand(alone, token, torch.zeros_like(token))
            torch.testing.assert_close(levels[depth][:, node], guesses.logits[:, 0], **EXACT)


@pytest.mark.usefixtures("reads_back")
@torch.inference_mode()
def test_a_draft_leaves_nothing_behind(drafter):
    ids, features = text_and_features(drafter, 3, 16)
    plain = observed(drafter, features, ids, [[4, 2, 6], [7, 6, 9]])
    state = observed(drafter, features, ids, [[4, 2, 6]])
    for width in (1, 3, 2):  # a tree, drafted and thrown away
        tokens = torch.full((3, width), 11 + width)
        state, _ = drafter.expand(state, tokens, torch.zeros_like(tokens))
    lengths = torch.tensor([3, 4, 3])
    at = torch.tensor([[4, 5, 6, 6], [2, 3, 4, 5], [6, 7, 8, 8]])
    rows = torch.arange(3).unsqueeze(1)
    state = drafter.observe(state, features[rows, at], ids[rows, at + 1], lengths)
    for ours, theirs in zip(
        chain(drafter, state, ids, [7, 6, 9], depth_of(drafter)),
        chain(drafter, plain, ids, [7, 6, 9], depth_of(drafter)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, **EXACT)


@torch.inference_mode()
def test_two_drafts_at_once_do_not_disturb_each_other(drafter):
    ids, features = text_and_features(drafter, 2, 10)
    other_ids, other_features = text_and_features(drafter, 1, 10, seed=5)
    depth = depth_of(drafter)
    expected = chain(drafter, observed(drafter, features, ids, [[4, 3]]), ids, [4, 3], depth)
    first = observed(drafter, features, ids, [[4, 3]])
    second, mixed = observed(drafter, other_features, other_ids, [[6]]), []
    for level in range(depth):
        tokens = torch.stack([ids[0, 4 + level], ids[1, 3 + level]]).unsqueeze(1)
        first, guesses = drafter.expand(first, tokens, torch.zeros_like(tokens))
        second, _ = drafter.expand(second, other_ids[:, [level]], torch.zeros(1, 1, dtype=torch.long))
        if level == 1:
            second = drafter.observe(second, other_features[:, :2], other_ids[:, :2], torch.tensor([2]))
            second, _ = drafter.expand(second, other_ids[:, [0]], torch.zeros(1, 1, dtype=torch.long))
        mixed.append(guesses.logits[:, 0])
    for ours, theirs in zip(mixed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


@torch.inference_mode()
def test_a_node_of_eagle_is_what_its_guess_would_be_as_verified_text():
    drafter = Family("eagle", EagleForCausalLM).build(tiny_base("llama-gqa")).drafter
    ids, features = text_and_features(drafter, 2, 10)
    tree = observed(drafter, features, ids, [[5, 3]])
    text = copy.deepcopy(tree)
    tokens = [torch.tensor([[17], [23]]), torch.tensor([[4], [9]]), torch.tensor([[50], [6]])]
    tree, _ = drafter.expand(tree, ids[torch.arange(2), torch.tensor([5, 3])].unsqueeze(1), torch.zeros_like(tokens[0]))
    for token in tokens:
        text = drafter.observe(text, text.last.unsqueeze(1), token, torch.tensor([1, 1]))
        tree, guesses = drafter.expand(tree, token, torch.zeros_like(token))
        torch.testing.assert_close(tree.level[:, 0], text.last, **EXACT)
        torch.testing.assert_close(guesses.logits[:, 0], drafter.head_logits(0, text.last), **EXACT)


def test_heads_learn(drafter):
    ids, features = text_and_features(drafter, 2, 12)
    for i, states in enumerate(drafter.head_states(features, ids)):
        assert states.shape[:2] == (2, 12) and states.shape[2] >= drafter.config.own_layer.hidden_size
        drafter.head_logits(i, states).logsumexp(-1).sum().backward(retain_graph=True)
        if (foretold := drafter.confidence_logits(states)) is not None:
            foretold.sum().backward(retain_graph=True)
    assert all(parameter.grad is not None for parameter in drafter.parameters())
    assert all(parameter.grad.any() for parameter in drafter.parameters() if parameter.dim() > 1)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_layers_that_are_recomputed_give_the_same_gradients(family):
    """By the package, which keeps the keys of chains, in every family that has decoder layers, all of them."""
    here = not family.name.startswith(("medusa", "hydra-", "draft-model", "gemma4")) and family.name != "hydra"
    runs: list[int] = []
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    for padding, how in ((None, None), (mask, {"use_reentrant": True} if here else None)):
        results, counts = [], []
        for recomputed in (False, True):
            model = family.build(tiny_base("llama-gqa")).train()
            if recomputed:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
            layers = [layer for layer in model.drafter.modules() if isinstance(layer, DecoderLayer)]
            for part in {part for layer in layers for part in layer.modules() if hasattr(part, "q_proj")}:
                part.register_forward_pre_hook(lambda *_: runs.append(0))
            ids, features = text_and_features(model.drafter, 2, 9)
            runs.clear()
            states = model.drafter.head_states(features, ids, padding)
            logits = torch.stack([model.drafter.head_logits(i, of_head) for i, of_head in enumerate(states)])
            logits.sum().backward()
            counts.append(len(runs))
            gradients = [one.grad for one in model.drafter.parameters() if one.grad is not None]
            results.append([logits.detach(), *gradients])
        assert counts[1] == 2 * counts[0]
        for plain, again in zip(*results, strict=True):
            torch.testing.assert_close(again, plain)
