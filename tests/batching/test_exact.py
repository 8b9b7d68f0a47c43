"""Every request has the text that it would have alone, whoever else is decoded, joins and leaves."""

import os
import random
from functools import cache

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.generation import programs, runner
from hf_drafthead.generation.noise import RandomNumbers
from hf_drafthead.modeling import DraftModelForCausalLM
from tests.bases import tiny_base
from tests.batching.requests import add, alone, asked, final, prompt
from tests.families import FAMILIES
from tests.generation.agreement import shared_base
from tests.generation.test_recorded import recordings  # noqa: F401

REQUESTS = int(os.environ.get("MANY_REQUESTS", "60"))
MEDUSA = next(family for family in FAMILIES if family.name == "medusa")
hybrid_base = cache(tiny_base)


def compare(manager, base, requests):
    """Put all requests at once and compare every text."""
    expected = [alone(base, request) for request in requests]
    names = [add(manager, request) for request in requests]
    got = [final(manager, name) for name in names]
    assert [result.error for result in got] == [None] * len(requests)
    assert [result.generated_tokens for result in got] == expected
    assert [result.prompt_ids for result in got] == [tokens for tokens, _ in requests]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_heads_of_every_family(family, managed):
    base, dice = shared_base("llama-gqa"), random.Random(family.name)
    model = family.build(base)
    tree = [path for path in [[0], [1], [0, 0], [0, 1]] if len(path) <= (model.drafter.max_depth or 2)]
    compare(managed(model, draft_tree=tree), base, [asked(dice, 24) for _ in range(8)])


KINDS = ["llama", "mistral-sliding", "gemma2", "gpt2", "gemma4-sharing", "qwen3.5", "lfm2", "granite-hybrid"]


@pytest.mark.parametrize("kind", KINDS)
def test_bases_of_every_kind(kind, managed):
    base, dice = hybrid_base(kind), random.Random(kind)
    compare(managed(MEDUSA.build(base), draft_tree=[[0], [1], [0, 0]]), base, [asked(dice, 12) for _ in range(6)])


@pytest.mark.parametrize("more", [{}, {"num_beams": 2}], ids=["shared", "alone"])
def test_pad_tokens_in_a_prompt_are_no_padding(more, managed):
    """As the turns of a chat may end with one; without a mask the base itself would take them for padding."""
    base, tokens = shared_base("llama-gqa"), [7, 3, 8, 3, 9]
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 3, "eos_token_id": 60, **more}
    manager = managed(MEDUSA.build(base), draft_tree=[[0], [1], [0, 0]])
    result = final(manager, manager.add_request(tokens, **settings))
    assert result.error is None
    texts = [
        base.generate(torch.tensor([tokens]), attention_mask=mask, **settings)[0, len(tokens) :].tolist()
        for mask in (torch.ones(1, len(tokens), dtype=torch.long), None)
    ]
    assert result.generated_tokens == texts[0] != texts[1]
    assert bool(manager.metrics()["steps"]) == (not more)


@pytest.mark.parametrize("tree", [None, [], "dynamic", [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]], ids=str)
def test_every_kind_of_tree(tree, guessing, managed):
    dice = random.Random(3)
    manager = managed(guessing, draft_tree=tree) if tree != [] else managed(guessing, draft_tree=[[0]])
    compare(manager, guessing.base, [asked(dice, 24) for _ in range(8)])
    assert manager.metrics()["tokens_per_step_and_request"] > 1.3


def test_copies_of_the_text(managed):
    base, dice = shared_base("llama-gqa"), random.Random(4)
    model = MEDUSA.build(base)
    config = model.generation_config.__class__(prompt_lookup_num_tokens=4)
    manager = managed(model, generation_config=config)
    compare(manager, base, [asked(dice, 24) for _ in range(8)])


@pytest.mark.few(1)
@pytest.mark.parametrize("execution", ["eager", "recorded"])
def test_what_was_answered_is_copied(execution, managed, request):
    """And what the user names; the second time a request is asked takes fewer steps, and has the same text."""
    if execution == "recorded":
        request.getfixturevalue("recordings")
    base, dice = shared_base("llama-gqa"), random.Random(5)
    tree = [[0], [1], [2], [0, 0], [1, 0], [2, 0]]
    named, asks = [prompt(dice) for _ in range(20)], [asked(dice, 24) for _ in range(8)]
    for _, settings in asks:
        settings |= {"max_new_tokens": 24, "eos_token_id": None}
    manager = managed(MEDUSA.build(base), draft_tree=tree, lookup_texts=named, lookup_answers=True)
    steps = []
    for _ in range(2):
        before = manager._figures.rows
        compare(manager, base, asks)
        steps.append(manager._figures.rows - before)
    assert steps[1] < 0.6 * steps[0]


def test_prompts_that_begin_alike_are_read_once(guessing, managed):
    """And long ones in pieces, between which others go on."""
    dice, base = random.Random(12), guessing.base
    manager, start = managed(guessing, slots=4, longest_pause=0.0), prompt(dice, 1) * 40 + prompt(dice)
    requests = [
        (start + prompt(dice) * dice.choice([1, 10]), asked(dice)[1] | {"max_new_tokens": 30}) for _ in range(8)
    ]
    for _, settings in requests:
        settings.pop("repetition_penalty", None)
    read, texts = [], BaseReader.__call__

    def counted(self, last_only, **inputs):
        read.append(inputs["input_ids"].shape[1])
        return texts(self, last_only, **inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseReader, "__call__", counted)
        compare(manager, base, requests)
    assert max(read[1:]) <= 128 and sum(read) < sum(len(tokens) for tokens, _ in requests) - 3 * 40


@pytest.mark.parametrize("execution", ["compiled", "recorded"])
def test_steps_of_fixed_shapes_are_made_once(execution, guessing, managed, monkeypatch, request):
    """Whoever joins and leaves; texts that outgrow the memory go on in a larger one."""
    made = []
    monkeypatch.setattr(programs, "compiled", lambda function, config: made.append(function) or function)
    monkeypatch.setattr(runner, "AHEAD", 32)
    config = GenerationConfig(cache_implementation="static") if execution == "compiled" else None
    recorded = request.getfixturevalue("recordings") if execution == "recorded" else made
    manager, dice = managed(guessing, generation_config=config), random.Random(13)
    requests = [asked(dice, 24) for _ in range(10)]
    compare(manager, guessing.base, requests)
    before = len(recorded)
    assert before == (3 if execution == "compiled" else before) and before >= 3
    compare(manager, guessing.base, requests)
    assert len(recorded) == before


@pytest.mark.parametrize("execution", ["compiled", "recorded"])
def test_a_manager_that_was_warmed_up_makes_no_program_for_a_request(
    execution, guessing, managed, monkeypatch, request
):
    """And nothing else is left of what it did."""
    made, dice = [], random.Random(14)
    monkeypatch.setattr(programs, "compiled", lambda function, config: made.append(function) or function)
    recorded = request.getfixturevalue("recordings") if execution == "recorded" else made
    config = GenerationConfig(cache_implementation="static") if execution == "compiled" else None
    model = DraftModelForCausalLM.from_base(guessing.base, draft=guessing.drafter.model).eval()  # has no programs yet
    manager, state = managed(model, start=False, generation_config=config, lookup_answers=True), torch.get_rng_state()
    manager.warmup()
    before = len(recorded)
    assert before >= 2 and torch.equal(torch.get_rng_state(), state)
    assert not manager._results and manager.metrics()["tokens"] == manager.metrics()["finished"] == 0
    assert manager._answers.next == 0
    manager.start()
    compare(
        manager,
        guessing.base,
        [(tokens, {**settings, "max_new_tokens": 5}) for tokens, settings in (asked(dice) for _ in range(5))],
    )
    assert len(recorded) == before


def test_a_random_crowd(guessing, managed):
    """Random settings and seeds, some that are cancelled, and some with processors that raise."""
    dice, base = random.Random(11), guessing.base
    manager = managed(guessing, slots=5)
    requests, fates, names = [asked(dice, 24) for _ in range(REQUESTS)], [], []
    for request in requests:
        fate = "cancel" if dice.random() < 0.05 else "raise" if dice.random() < 0.02 else "finish"
        more = {"logits_processor": [Fails(dice.randint(1, 12))]} if fate == "raise" else {}
        names.append(add(manager, request, **more))
        if fate == "cancel":
            manager.cancel_request(names[-1])
        fates.append(fate)
    manager.stop()
    results = {}
    for result in manager:
        assert result.request_id not in results, "answered twice"
        results[result.request_id] = result
    assert sorted(results) == sorted(names), "lost"
    for name, fate, request in zip(names, fates, requests):
        result, expected = results[name], alone(base, request)
        if result.error is None:
            assert result.generated_tokens == expected
        else:
            assert fate != "finish", result.error
            assert expected[: len(result.generated_tokens)] == result.generated_tokens


class Fails(LogitsProcessor):
    """Raises at some call."""

    def __init__(self, calls: int):
        self.left = calls

    def __call__(self, input_ids, scores):
        self.left -= 1
        if not self.left:
            raise ZeroDivisionError("the processor's own")
        return scores


class Counts(LogitsProcessor):
    """Keeps a state: forbids one token more at every call, and says so."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        return scores.index_fill(1, torch.tensor([len(self.seen) % scores.shape[1]]), -torch.inf)


class Noisy(LogitsProcessor):
    """Draws from the process's generator."""

    def __call__(self, input_ids, scores):
        return scores + torch.rand_like(scores)


class Ends(StoppingCriteria):
    """Fires on some tokens."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], torch.tensor([20, 21, 22]))


OBJECTS = {
    "a processor with a state": lambda: {"logits_processor": [Counts()]},
    "a processor that draws": lambda: {"logits_processor": [Noisy()]},
    "a criterion": lambda: {"stopping_criteria": [Ends()]},
    "allowed tokens": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: [*range(3 + len(ids) % 3, 60, 3)]},
    "guidance": lambda: {"guidance_scale": 1.4},
    "beams": lambda: {"num_beams": 2},
    "decay": lambda: {"exponential_decay_length_penalty": (3, 1.3)},
    "a static cache": lambda: {"cache_implementation": "static"},
}


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", OBJECTS)
def test_settings_of_the_users_own(name, sample, guessing, managed):
    """Beside requests without any; what cannot share a batch is decoded alone between two steps."""
    dice, requests = random.Random(name), []
    for number in range(6):
        settings = {"max_new_tokens": 20, "eos_token_id": [2], "seed": number}
        settings |= {"do_sample": True, "top_k": 8} if sample else {}
        requests.append((prompt(dice), settings, OBJECTS[name] if number % 2 == 0 else dict))
    # before the others begin: what draws from the process's generator here would move it there
    expected = [alone(guessing.base, (tokens, settings | make())) for tokens, settings, make in requests]
    manager = managed(guessing)
    names = [add(manager, (tokens, settings | make())) for tokens, settings, make in requests]
    assert [final(manager, each).generated_tokens for each in names] == expected


def test_a_processor_sees_the_calls_that_it_would_see_alone(guessing, managed):
    dice, manager = random.Random(5), managed(guessing)
    pairs = [(Counts(), Counts()) for _ in range(4)]
    prompts = [prompt(dice) for _ in pairs]
    settings = {"max_new_tokens": 15, "eos_token_id": None}
    names = [add(manager, (each, {**settings, "logits_processor": [ours]})) for each, (ours, _) in zip(prompts, pairs)]
    for name, each, (ours, theirs) in zip(names, prompts, pairs):
        final(manager, name)
        alone(guessing.base, (each, {**settings, "logits_processor": [theirs]}))
        assert ours.seen == theirs.seen


class Puts(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.given = []

    def put(self, value):
        self.given.append(value.tolist())

    def end(self):
        self.given.append("end")


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_a_streamer_is_given_what_the_base_gives_it(sample, guessing, managed):
    dice, manager = random.Random(6), managed(guessing)
    for seed in range(5):
        tokens, settings = prompt(dice), {"max_new_tokens": dice.randint(1, 20), "do_sample": sample, "seed": seed}
        theirs, ours = Puts(), Puts()
        alone(guessing.base, (tokens, {**settings, "streamer": theirs}))
        final(manager, add(manager, (tokens, {**settings, "streamer": ours})))
        assert ours.given == theirs.given


def test_without_a_seed_the_noise_is_that_of_a_call_that_begins_now(guessing, managed):
    manager, settings = managed(guessing), {"max_new_tokens": 20, "do_sample": True, "eos_token_id": None}
    expected = alone(guessing.base, ([5, 6, 7], {**settings, "seed": 3}))
    torch.manual_seed(3)
    first, second = (add(manager, ([5, 6, 7], settings)) for _ in range(2))
    assert final(manager, first).generated_tokens == expected
    assert final(manager, second).generated_tokens != expected


def test_without_seeds_the_numbers_are_the_same_in_every_process():
    """So that a run that begins with `torch.manual_seed` can be repeated."""
    torch.manual_seed(3)
    RandomNumbers.of_request(torch.device("cpu"))
    assert torch.initial_seed() == 33493538459992543


def test_the_generator_of_the_process_is_not_moved_by_requests_with_seeds(guessing, managed):
    manager, dice = managed(guessing), random.Random(8)
    before = torch.get_rng_state()
    settings = {"max_new_tokens": 12, "do_sample": True, "logits_processor": [Noisy()]}
    names = [add(manager, (prompt(dice), {**settings, "seed": seed})) for seed in range(5)]
    for name in names:
        final(manager, name)
    assert torch.equal(torch.get_rng_state(), before)


def no_copy(self, row, other):
    """In the place of `SlotCache.put_row`: the lengths alone."""
    self.lengths[row] = other.lengths[0]
    self.extent = max(self.extent, other.extent)


def one_seed(device, seed=None, right=RandomNumbers.of_request):
    """In the place of `RandomNumbers.of_request`."""
    return right(device, 1)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "where, name, fault",
    [(SlotCache, "put_row", no_copy), (RandomNumbers, "of_request", staticmethod(one_seed))],
    ids=["keys stay where they were", "one seed for all"],
)
def test_the_law_can_fail(where, name, fault, guessing, managed, monkeypatch):
    dice, manager = random.Random(9), managed(guessing)
    monkeypatch.setattr(where, name, fault)
    with pytest.raises(AssertionError):
        compare(manager, guessing.base, [asked(dice) for _ in range(20)])
