"""Block drafters give the numbers of the original implementations: blocks, bias, confidence, and of all whole texts."""

import pytest
import torch
from torch import Tensor

from hf_drafthead.bases.reader import BaseReader
from tests.modeling.block_golden import TOLERANCE, golden_base, load

pytestmark = pytest.mark.usefixtures("without_gradients")
STEPS = ["dflash_z_qwen3_b4_n1_l1_kv1", "dflash_z_qwen3_b8_n3_l2", "dflash_d_qwen3_b7_n2_l2"]
STEPS += ["dspark_vanilla_qwen3_b7", "dspark_gated_qwen3_b5"]
TEXTS = ["dflash_s_swa_causal_qwen3_b6", "dspark_s_vanilla_qwen3_b5"]
ZERO = torch.zeros(1, 1, dtype=torch.long)


def walked(drafter, state, tokens: Tensor):
    """The state and the logits (1, K, D) along given tokens (1, K) before each slot, the anchor first."""
    found = []
    for token in tokens[0]:
        state, guesses = drafter.expand(state, token.view(1, 1), ZERO)
        found.append(guesses.logits[:, 0])
    return state, torch.stack(found, dim=1)


def greedily(drafter, state, anchor: Tensor) -> tuple[list[int], Tensor]:
    """Tokens and logits (1, K', D) of the chain of best guesses, cut where nothing is guessed."""
    tokens, logits, token = [], [], anchor.view(1, 1)
    for _ in range(drafter.config.num_draft_heads):
        state, guesses = drafter.expand(state, token, ZERO)
        if not guesses.logits.isfinite().any():
            break
        token = guesses.top(1)[0][:, 0]
        tokens.append(int(token))
        logits.append(guesses.logits[:, 0])
    return tokens, torch.stack(logits, dim=1) if logits else torch.empty(0)


@pytest.mark.parametrize("name", STEPS)
def test_two_drafting_steps(name, tmp_path):
    case = load(name)
    model, given = case.model(tmp_path), case.tensors
    drafter, slots = model.drafter, slice(case.facts["read_slots"][0], None)
    ids = given["in.input_ids"]
    features = BaseReader.of_texts(model.base, drafter.reads).read_texts(ids).features
    length = given["in.target_hidden"].shape[1]
    torch.testing.assert_close(features[:, :length], given["in.target_hidden"], **TOLERANCE)
    state = drafter.start(1, 64)
    for number, step in enumerate(case.facts["steps"], start=1):
        first, last = step["new_context"]
        follow = ids[:, first + 1 : last + 1]
        state = drafter.observe(state, features[:, first:last], follow, torch.tensor([last - first]))
        anchor = torch.tensor([[step["anchor_token"]]])
        tokens, _ = greedily(drafter, state, anchor)
        out = f"out.step{number}."
        before = given.get(f"in.step{number}.prev_token_ids", torch.tensor([[int(anchor), *tokens[:-1]]]))
        block, logits = walked(drafter, state, before)
        torch.testing.assert_close(block.hidden, given[out + "hidden"][:, slots], **TOLERANCE)
        torch.testing.assert_close(block.logits, given[out + "logits"][:, slots], **TOLERANCE)
        if out + "ctx_k" in given:
            for layer, part in enumerate(state.cache.layers):
                past = slice(state.cache.nodes, state.cache.nodes + last)
                torch.testing.assert_close(part.keys[:, :, past], given[out + "ctx_k"][layer], **TOLERANCE)
                torch.testing.assert_close(part.values[:, :, past], given[out + "ctx_v"][layer], **TOLERANCE)
        if out + "markov_logits" in given:
            torch.testing.assert_close(logits, given[out + "markov_logits"], **TOLERANCE)
        if out + "greedy_tokens" in given:
            assert tokens == given[out + "greedy_tokens"][0].tolist()
        if out + "confidence_given_prev" in given:
            for which, along in (
                ("confidence_given_prev", before),
                ("greedy_confidence", [[int(anchor), *tokens[:-1]]]),
            ):
                states = _states_at(drafter, features[:, :last], ids[:, : last + 1], anchor, torch.as_tensor(along))
                sure = torch.stack([drafter.confidence_logits(one)[0, 0] for one in states])
                torch.testing.assert_close(sure, given[out + which][0], **TOLERANCE)


def _states_at(drafter, features: Tensor, ids: Tensor, anchor: Tensor, before: Tensor) -> list[Tensor]:
    """The states of training of one block, whose anchor follows all features and whose tokens are `before`."""
    text = torch.cat([ids[:, : features.shape[1]], anchor, before[:, 1:]], dim=1)
    wide = torch.nn.functional.pad(features, (0, 0, 0, text.shape[1] - features.shape[1]))
    return drafter.head_states(wide, text, None, torch.tensor([[features.shape[1] - 1]]))


@pytest.mark.parametrize("name", TEXTS)
def test_a_training_forward_of_speculators(name, tmp_path):
    case = load(name)
    drafter, given = case.model(tmp_path).drafter, case.tensors
    heads, block = drafter.config.num_draft_heads, drafter.config.block_size
    expected = given.get("out.markov_logits", given["out.logits"])[0].unflatten(0, (-1, block))[:, -heads:]
    found, sure, documents = [], [], given["in.document_ids"][0]
    for document in documents.unique():
        places = (documents == document).nonzero().flatten()
        text = slice(int(places[0]), int(places[-1]) + 1)
        anchors = given["in.anchor_positions"]
        anchors = anchors[(anchors >= text.start) & (anchors < text.stop)] - text.start
        features, ids = given["in.target_hidden"][:, text], given["in.input_ids"][:, text]
        states = drafter.head_states(features, ids, None, anchors[None] - 1)
        found.append(torch.stack([drafter.head_logits(head, one)[0] for head, one in enumerate(states)], dim=1))
        if drafter.confidence is not None:
            sure.append(torch.stack([drafter.confidence_logits(one)[0] for one in states], dim=1))
    torch.testing.assert_close(torch.cat(found), expected, **TOLERANCE)
    if sure:
        torch.testing.assert_close(torch.cat(sure).flatten(), given["out.confidence_logits"][0], **TOLERANCE)


RUNS = {"dflash_z_qwen3_b8": 2, "dspark_vanilla_qwen3_b7": 4, "dflash2_z_qwen3_b8": 2, "peagle_s_qwen3_k5": 2}


@pytest.mark.few(6)
@pytest.mark.parametrize("name, number", [(name, number) for name, runs in RUNS.items() for number in range(runs)])
def test_the_original_loop(name, number, tmp_path):
    """What is drafted in every step, how much of it the base takes, and the text."""
    case, base = load(f"e2e_{name}"), golden_base()
    run, out = case.facts["runs"][number], f"out.run{number}."
    threshold = run.get("confidence_threshold") or None
    model = case.model(tmp_path, **({"confidence_threshold": threshold} if threshold else {}))
    drafter = model.drafter
    prompt, original = (
        case.tensors[f"in.run{number}.input_ids"],
        run.get("acceptance_lengths", run.get("accepted_lengths")),
    )
    text, known, state = prompt[0].tolist(), 0, drafter.start(1, 128)
    reader = BaseReader.of_texts(base, drafter.reads)
    text.append(int(base(torch.tensor([text])).logits[0, -1].argmax()))
    for step, (drafted, accepted) in enumerate(zip(run["drafted"], original, strict=True)):
        ids = torch.tensor([text])
        features = reader.read_texts(ids[:, :-1]).features[:, known:]
        state = drafter.observe(state, features, ids[:, known + 1 :], torch.tensor([features.shape[1]]))
        known = len(text) - 1
        tokens, logits = greedily(drafter, state, ids[0, -1])
        cut = name.startswith("dflash2") and len(drafted) < len(tokens)  # there to what is left, which other slots see
        assert tokens == drafted or cut
        if f"{out}draft_logits" in case.tensors:
            torch.testing.assert_close(logits[0], case.tensors[f"{out}draft_logits"][step], atol=1e-4, rtol=0.0)
        choice = base(torch.tensor([text + tokens])).logits[0, known:].argmax(-1).tolist()
        right = next((place for place, token in enumerate(tokens) if token != choice[place]), len(tokens))
        assert 1 + right == accepted or cut
        text += choice[: right + 1]
    expected = case.tensors[f"{out}output_ids"][0].tolist()
    assert text[: len(expected)] == expected
    chain = [[0] * depth for depth in range(1, drafter.config.num_draft_heads + 1)]
    call = {"max_new_tokens": case.facts.get("max_new_tokens", 40), "do_sample": False, "eos_token_id": None}
    found = model.generate(prompt, **call, draft_tree=chain, return_dict_in_generate=True)
    assert found.sequences[0].tolist() == expected == base.generate(prompt, **call)[0].tolist()
    if threshold is None:  # below a cut a static tree has nodes all the same
        steps = found.accepted_lengths[0].tolist()
        assert steps[:-1] == original[: len(steps) - 1]  # whose last one may go beyond the end of the text
        assert steps[-1] <= original[len(steps) - 1] and len(original) - len(steps) in (0, 1)
