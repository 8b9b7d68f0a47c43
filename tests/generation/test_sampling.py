"""Sampling: guesses that know the noise with which the base will choose, and a text that is the base's all the same."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig, LogitsProcessor

from hf_drafthead import zoo
from hf_drafthead.generation import Guesses, noise, rules
from hf_drafthead.modeling import DraftModelForCausalLM
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES
from tests.generation.agreement import TREE, as_the_base, prompt, shared_base

TRACED = CompileConfig(backend="eager", mode="default")


def same_as_base(model, call, *, seed=11, draft_tree=TREE, **settings):
    """Sample with the base and with the model from one seed: tokens and generator agree; returns the model's output."""
    return as_the_base(model, {**call, "do_sample": True}, seed, draft_tree=draft_tree, **settings)


class Noisy(LogitsProcessor):
    """Draws from the generator that sampling uses."""

    def __call__(self, input_ids, scores):
        return scores + 0.1 * torch.randn_like(scores)


class Fewer(LogitsProcessor):
    """Leaves some of the scores, where the text has so many tokens."""

    def __init__(self, first, behind):
        self.lengths = range(first, behind)

    def __call__(self, input_ids, scores):
        return scores[:, :40] if input_ids.shape[1] in self.lengths else scores


PROCESSORS = {
    "none": {"top_k": 0},
    "top-k and top-p": {"top_k": 20, "top_p": 0.8},
    "those that see the prefix": {"repetition_penalty": 1.3, "min_new_tokens": 9},
    "one that draws": {"logits_processor": [Noisy()]},
    "one that leaves few": {"logits_processor": [Fewer(0, 99)]},
    "one that leaves few for a while": {"logits_processor": [Fewer(15, 22)]},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("rows, captured", [(1, False), (3, False), (3, True)], ids=["alone", "batch", "captured"])
def test_the_text_and_the_generator_are_the_base_s(rows, captured):
    model = FAMILIES[0].build(shared_base("llama-gqa"))
    for temperature, asked in product([0.3, 1.0, 1e-6], PROCESSORS.values()):
        call = {**prompt(rows), "max_new_tokens": 20, "eos_token_id": [2, 9], "temperature": temperature, **asked}
        same_as_base(model, call, **({"compile_config": TRACED} if captured else {}))


def test_noise_is_drawn_for_as_many_scores_as_a_processor_leaves_however_far_ahead_it_was_drawn():
    model = FAMILIES[0].build(shared_base("llama-gqa"))
    call = {**prompt(1), "max_new_tokens": 60, "eos_token_id": None, "top_k": 0}
    call["logits_processor"] = [lambda ids, scores: scores[:, :40] if ids.shape[1] % 4 == 1 else scores]
    same_as_base(model, call, draft_tree="lookup", prompt_lookup_num_tokens=noise.NoiseTape.KEPT + 8)


@pytest.mark.parametrize("rows", [1, 3])
def test_every_noise_is_drawn_once(rows, monkeypatch):
    drawn, draw = [], noise.NoiseTape._draw
    monkeypatch.setattr(noise.NoiseTape, "_draw", lambda self, *given: drawn.append(1) or draw(self, *given))
    model = FAMILIES[0].build(shared_base("llama-gqa"))
    for asked in ({}, {"repetition_penalty": 1.2}):
        drawn.clear()
        same_as_base(model, {**prompt(rows), "max_new_tokens": 20, "eos_token_id": None, **asked})
        assert 20 <= len(drawn) <= 20 + 4  # one for each node of a longest path


def noted(monkeypatch):
    """The tilts of all steps."""
    found, tilt = [], rules.Rules.tilt
    monkeypatch.setattr(rules.Rules, "tilt", lambda self, noise: found.append(tilt(self, noise)) or found[-1])
    return found


@pytest.mark.parametrize("asked", PROCESSORS.values(), ids=PROCESSORS)
def test_guesses_know_the_noise_unless_somebody_else_draws(asked, monkeypatch):
    tilts = noted(monkeypatch)
    model = FAMILIES[0].build(shared_base("llama-gqa"))
    same_as_base(model, {**prompt(), "max_new_tokens": 9, "eos_token_id": None, **asked})
    assert tilts and all(bool(tilt.any()) == ("logits_processor" not in asked) for tilt in tilts)


@pytest.mark.few(1)
@pytest.mark.parametrize("rows, captured", [(1, False), (3, False), (3, True)], ids=["alone", "batch", "captured"])
def test_the_base_as_its_own_draft_model_foresees_every_sample(rows, captured):
    """Where q is p, the first child is the very token that the base samples; a pause in any row would show."""
    base = shared_base("llama-gqa")
    model = DraftModelForCausalLM.from_base(base, draft=base)
    for temperature in (0.5, 1.5):
        call = {**prompt(rows), "max_new_tokens": 30, "eos_token_id": None, "temperature": temperature, "top_k": 0}
        found = same_as_base(model, call, **({"compile_config": TRACED} if captured else {}))
        assert (found.accepted_lengths[:, :-1] == 4).all()


def test_the_order_of_guesses_is_that_of_q_over_the_noise():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, VOCABULARY, generator=generator)
    noise = torch.empty(2, VOCABULARY).exponential_(1, generator=generator)
    for temperature in (0.5, 1.0, 2.0):
        tilt = noise.log() * -temperature
        tokens, scores = Guesses(logits).top(5, tilt)
        q = (logits / temperature).softmax(-1)
        assert torch.equal(tokens, (q / noise[:, None]).topk(5).indices)
        assert torch.equal(scores, (logits + tilt[:, None]).gather(-1, tokens))


def test_a_drafter_of_some_tokens_only_is_tilted_by_the_noise_of_these():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 1, 20, generator=generator)
    own = torch.randperm(VOCABULARY, generator=generator)[:20]
    tilt = torch.randn(2, VOCABULARY, generator=generator)
    tokens, _ = Guesses(logits, own).top(4, tilt)
    everywhere = Guesses(logits, own).over_base(VOCABULARY) + tilt[:, None]
    assert torch.equal(tokens, everywhere.topk(4).indices)


@pytest.mark.few(1)
@pytest.mark.parametrize("name, least", [("medusa", 1.15), ("eagle", 1.3)])
def test_more_tokens_per_step_than_with_guesses_that_do_not_know_the_noise(name, least, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(zoo.path(name)).eval()
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("base"))
    texts = [json.loads(line)["prompt"] for line in (zoo.ASSETS / "prompts.jsonl").read_text().splitlines()[:2]]

    def tokens_per_step() -> float:
        accepted = []
        for text in texts:
            torch.manual_seed(0)
            call = {"do_sample": True, "top_k": 0, "max_new_tokens": 48, "return_dict_in_generate": True}
            call["draft_tree"] = model.generation_config.draft_tree  # 48 nodes, and not the calibrated ones
            accepted += model.generate(**tokenizer(text, return_tensors="pt"), **call).accepted_lengths[0].tolist()
        return sum(accepted) / len(accepted)

    knowing = tokens_per_step()
    monkeypatch.setattr(rules.Rules, "tilt", lambda self, noise: torch.zeros_like(noise))
    assert knowing > least * tokens_per_step()


class Nothing(LogitsProcessor):
    """Leaves no token, or no number."""

    def __init__(self, score):
        self.score = score

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, self.score) if input_ids.shape[1] > 11 else scores

    def for_rows(self, rows):
        return self


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("score", [float("nan"), float("-inf")], ids=str)
def test_what_is_no_distribution_is_refused_as_by_the_base(score, rows):
    model = FAMILIES[0].build(shared_base("llama-gqa"))
    call = {**prompt(rows), "do_sample": True, "logits_processor": [Nothing(score)], "eos_token_id": None}
    for generate in (model.base.generate, partial(model.generate, draft_tree=TREE)):
        with pytest.raises(RuntimeError, match="^probability tensor contains either `inf`, `nan` or element < 0"):
            generate(**call, max_new_tokens=9)


@pytest.mark.parametrize("acceptance", ["exact", "typical"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_base_that_says_no_number_in_the_middle_is_refused_as_by_itself(rows, acceptance):
    base = tiny_base("llama-gqa")
    model = FAMILIES[0].build(base)
    call = {**prompt(rows), "do_sample": True, "eos_token_id": None, "max_new_tokens": 9}
    steps, forwards = [], []

    def fails(module, args, logits):
        if len(steps) < 2:
            return logits
        forwards.append(1)
        return logits * float("nan")

    base.lm_head.register_forward_hook(fails)
    refused = "^probability tensor contains either `inf`, `nan` or element < 0"
    with pytest.raises(RuntimeError, match=refused):
        model.generate(**call, acceptance=acceptance, draft_tree=TREE, on_step=steps.append)
    assert len(forwards) == 2  # what was drafted is verified once more, the root alone
    with pytest.raises(RuntimeError, match=refused):
        base.generate(**call)


@pytest.mark.parametrize("acceptance", ["exact", "typical"])
def test_a_temperature_that_leaves_one_token_gives_the_greedy_text_and_a_lower_one_is_refused_as_by_the_base(
    acceptance,
):
    model = FAMILIES[0].build(shared_base("llama-gqa"))
    call = {**prompt(3), "eos_token_id": None, "max_new_tokens": 12}
    ours = {"acceptance": acceptance, "draft_tree": TREE}
    greedy = model.base.generate(**call, do_sample=False)
    assert torch.equal(model.generate(**call, **ours, do_sample=True, temperature=1e-6), greedy)
    for generate in (model.base.generate, partial(model.generate, **ours)):
        with pytest.raises(RuntimeError, match="^probability tensor contains either `inf`, `nan` or element < 0"):
            generate(**call, do_sample=True, temperature=1e-42)


@pytest.mark.slow
@pytest.mark.parametrize("rows, captured", [(1, False), (3, False), (3, True)], ids=["alone", "batch", "captured"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_vocabulary_padded_beyond_the_tokenizer_is_sampled_as_by_the_base(family, rows, captured):
    """The base may write tokens that no text has; at a high temperature it does."""
    base = tiny_base("llama-gqa")
    base.resize_token_embeddings(pad_to_multiple_of=32)
    assert base.config.vocab_size == 96 > VOCABULARY
    call = {**prompt(rows), "max_new_tokens": 30, "eos_token_id": None, "temperature": 3.0, "top_k": 0}
    found = same_as_base(family.build(base), call, **({"compile_config": TRACED} if captured else {}))
    assert (found.sequences >= VOCABULARY).any()


def test_a_call_that_begins_as_another_does_draws_other_noise(monkeypatch):
    model, leave_at = FAMILIES[0].build(shared_base("llama")), noise.leave_at

    def slowly(generators, states):
        time.sleep(0.2)  # the other call would look at the generator meanwhile
        leave_at(generators, states)

    def request(_):
        return model.generate(prompt()["input_ids"], do_sample=True, max_new_tokens=24, draft_tree=TREE)

    monkeypatch.setattr(noise, "leave_at", slowly)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(request, range(2))
    assert one.shape != other.shape or not torch.equal(one, other)
