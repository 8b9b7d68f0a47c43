"""DFlash 2 gives the numbers of the original implementations: blocks, the selector's scores, losses."""

import pytest
import torch

from hf_drafthead.bases.reader import BaseReader, Reading
from hf_drafthead.training.heads_loss import IGNORED, HeadsLoss
from tests.modeling.block_golden import golden_base, load
from tests.modeling.test_golden_dflash import ZERO, greedily

STEPS = ["dflash2_z_qwen3_b8_n3_l2", "dflash2_z_swa_noncausal_scaled_b6"]
THEIRS = {"atol": 1e-4, "rtol": 0.0}


@pytest.mark.parametrize("name", STEPS)
@torch.no_grad()
def test_two_drafting_steps(name, tmp_path):
    case = load(name)
    drafter, given, ids = case.model(tmp_path).drafter, case.tensors, case.tensors["in.input_ids"]
    features = BaseReader.of_texts(golden_base(), drafter.reads).read_texts(ids).features
    state = drafter.start(1, 64)
    for number, step in enumerate(case.facts["steps"], start=1):
        first, last = step["new_context"]
        state = drafter.observe(
            state, features[:, first:last], ids[:, first + 1 : last + 1], torch.tensor([last - first])
        )
        out, anchor = f"out.step{number}.", torch.tensor([[step["anchor_token"]]])
        block, _ = drafter.expand(state, anchor, ZERO)
        torch.testing.assert_close(block.hidden, given[out + "hidden"][:, 1:], **THEIRS)
        torch.testing.assert_close(drafter._scores(block.hidden), given[out + "logits"][:, 1:], **THEIRS)
        path, _ = greedily(drafter, state, anchor)
        assert path == given[out + "path"][0].tolist() == step["path"]
        for along, expected, temperature in (("path", "scores_of_path", None), ("sampled_path", "sampled_q", 0.7)):
            tree, token = state, anchor
            for slot, candidates in enumerate(given[out + "candidates"][0]):
                tree, guesses = drafter.expand(tree, token, ZERO)
                scores = guesses.logits[0, 0]
                assert set(scores.isfinite().nonzero().flatten().tolist()) == set(candidates.tolist())
                found = scores if temperature is None else (scores / temperature).softmax(-1)
                torch.testing.assert_close(found[candidates], given[out + expected][0, slot], **THEIRS)
                token = given[out + along][:, slot : slot + 1]


@torch.no_grad()
def test_candidates_are_as_likely_together_as_the_slot_says(tmp_path):
    """A tree goes on below a guess by what the whole vocabulary leaves for it, not by the candidates alone."""
    case = load(STEPS[0])
    drafter, ids = case.model(tmp_path).drafter, case.tensors["in.input_ids"][:, :6]
    features = BaseReader.of_texts(golden_base(), drafter.reads).read_texts(ids).features[:, :5]
    state = drafter.observe(drafter.start(1, 64), features, ids[:, 1:], torch.tensor([5]))
    block, guesses = drafter.expand(state, ids[:, 5:], ZERO)
    tokens, chances = guesses.likeliest(drafter.config.selector_top_k)
    slot = drafter._scores(block.hidden)[0, 0].softmax(-1)
    torch.testing.assert_close(chances.exp().sum(), slot[tokens[0, 0]].sum())
    assert chances.exp().sum() < 0.999
    torch.testing.assert_close(chances.softmax(-1), guesses.top(len(tokens[0, 0]))[1].softmax(-1))


def read_case(tmp_path):
    """The drafter and, of each document, its text, features and anchors, and where its blocks lie in the record."""
    case = load("loss_dflash2_s_qwen3_b4")
    given, documents = case.tensors, case.tensors["in.document_ids"][0]
    model, parts, anchors = case.model(tmp_path), [], given["out.anchors"]
    for document in documents.unique():
        places = (documents == document).nonzero().flatten()
        text = slice(int(places[0]), int(places[-1]) + 1)
        inside = given["out.anchor_valid"].bool() & (anchors >= text.start) & (anchors < text.stop)
        if inside.any():
            parts.append((text, (anchors[inside] - text.start)[None], inside))
    return case, model, parts


def test_a_training_forward_and_loss_of_speculators(tmp_path):
    """Unary logits, candidates with the base's token put in, the choice among them, and both losses."""
    case, model, parts = read_case(tmp_path)
    given, drafter = case.tensors, model.drafter
    blocks, top = (len(given["out.anchors"]), 4), model.config.selector_top_k
    of_block = {name: given[f"out.{name}"][0].unflatten(0, blocks)[:, 1:] for name in ("logits", "targets")}
    mask = given["out.aligned_loss_mask"][0].view(blocks)[:, 1:].bool()
    for text, anchors, inside in parts:
        features, ids = given["in.hidden_states"][:, text], given["in.input_ids"][:, text]
        states = drafter.head_states(features, ids, None, anchors - 1)
        for head, state in enumerate(states):
            logits = drafter.unary_logits(head, state)[0]
            torch.testing.assert_close(logits, of_block["logits"][inside, head], **THEIRS)
            best, kept = of_block["targets"][inside, head].argmax(-1), mask[inside, head]
            theirs = given["out.training_candidates"][0].view(*blocks, top)[inside, 1 + head]
            scores = given["out.candidate_logits"][0].view(*blocks, top)[inside, 1 + head]
            expected = torch.nn.functional.cross_entropy(
                scores, (theirs == best[:, None]).int().argmax(1), reduction="none"
            )
            found = drafter.choice_loss(state[0], logits, best)
            torch.testing.assert_close(found[kept], expected[kept], **THEIRS)
            assert not drafter.choice_loss(state[0], logits, torch.full_like(best, IGNORED)).any()


def test_the_loss_has_the_choice_in_it_and_its_gradient_reaches_every_part(tmp_path):
    case, model, parts = read_case(tmp_path)
    text, anchors, _ = parts[0]
    features, ids = case.tensors["in.hidden_states"][:, text], case.tensors["in.input_ids"][:, text]
    hidden, drafter = torch.randn(1, ids.shape[1], 64), model.drafter.requires_grad_(True)
    inputs = {"input_ids": ids, "labels": ids.clone(), "anchors": anchors - 1}
    loss, _ = HeadsLoss(teacher=1.0, head_decay=0.8)(model, inputs, reading=Reading(features, hidden, hidden))
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    total, weight, base = 0.0, 0.0, model.base.lm_head(hidden)[0].softmax(-1).detach()
    for head, state in enumerate(drafter.head_states(features, ids, None, anchors - 1)):
        at = anchors[0] + head
        kept = at + 1 < ids.shape[1]
        logits, right = drafter.unary_logits(head, state)[0][kept], base[at[kept]]
        one = -(right * logits.log_softmax(-1)).sum(-1) + drafter.choice_loss(state[0][kept], logits, right.argmax(-1))
        total, weight = total + 0.8**head * one.sum(), weight + 0.8**head * kept.sum()
    (total / weight).backward()
    torch.testing.assert_close(loss, total / weight)
    for name, parameter in drafter.named_parameters():
        assert parameter.grad.any(), name
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4)
