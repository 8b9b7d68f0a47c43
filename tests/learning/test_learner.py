"""Heads learn from what they serve: no text changes, and weights only where that gains something."""

import copy
import functools
import itertools
import logging
import pickle
import time

import peft
import pytest
import torch

import hf_drafthead
from hf_drafthead.learning import Learner, RecentTexts
from hf_drafthead.learning import learner as learners
from hf_drafthead.learning.learner import FRESH, MOST_ROUNDS, ROWS
from hf_drafthead.learning.readings import Readings, size_of
from hf_drafthead.learning.texts import EVERY, LEAST_OF_A_KIND, LONGEST, OF_A_KIND
from hf_drafthead.training.heads_loss import HeadsLoss
from hf_drafthead.training.trainer import adapter_layers
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES

CALL = {"max_new_tokens": 16, "eos_token_id": -1}
FEW = [family for family in FAMILIES if family.name in ("medusa", "hydra++", "eagle3")]


def prompts(count, seed=0, kinds=6):
    """Few kinds of prompts, over and over, which heads soon know."""
    dice = torch.Generator().manual_seed(seed)
    some = torch.randint(3, VOCABULARY, (kinds, 6), generator=dice).tolist()
    return [some[number % kinds] for number in range(count)]


def answer(base, prompt, **call):
    return base.generate(torch.tensor([prompt]), **{**CALL, "eos_token_id": None, **call})[0, len(prompt) :].tolist()


def served(model, asked, rounds, **settings):
    """The texts of requests of a manager that learns, and the learner."""
    manager = model.init_continuous_batching(slots=4)
    learner = manager.learn(steps=4, **settings)
    manager.start()
    texts = []
    for _ in range(rounds):
        names = [manager.add_request(prompt, **CALL, **more) for prompt, more in asked]
        texts.append([manager.get_result(name).generated_tokens for name in names])
        while learner.wants:
            time.sleep(0.01)
    manager.stop()
    return texts, learner


def drafter_of(model):
    return [weight.detach().clone() for weight in model.drafter.parameters()]


@pytest.mark.parametrize("family", FEW, ids=lambda family: family.name)
def test_no_text_changes_while_the_heads_do(family, monkeypatch):
    model, loss, frozen = family.build(tiny_base("llama-gqa")), HeadsLoss.__call__, list[bool]()

    def noted(self, *arguments, **settings):  # other threads may want gradients at that time
        frozen.append(any(not weight.requires_grad for weight in model.base.parameters()))
        return loss(self, *arguments, **settings)

    monkeypatch.setattr(HeadsLoss, "__call__", noted)
    asked = [(prompt, {"do_sample": bool(place % 2), "seed": place}) for place, prompt in enumerate(prompts(12))]
    model.base.requires_grad_(True)
    before, of_base = drafter_of(model), [weight.clone() for weight in model.base.parameters()]
    expected = []
    for prompt, more in asked:
        torch.manual_seed(more["seed"])
        expected.append(answer(model.base, prompt, do_sample=more["do_sample"]))
    state = torch.get_rng_state()
    texts, learner = served(model, asked, 5, learning_rate=0.01)
    assert all(text == expected for text in texts)
    assert learner.stopped is None and learner.rounds > 1
    assert all(map(torch.equal, before, drafter_of(model))) == (not learner.taken)
    assert family.name != "medusa" or learner.taken > 0 and learner.now > learner.first
    assert all(map(torch.equal, of_base, model.base.parameters())) and torch.equal(state, torch.get_rng_state())
    assert all(weight.grad is None for weight in model.base.parameters()) and frozen and not any(frozen)


def test_that_law_finds_a_learner_that_writes_into_the_base(monkeypatch):
    model, write = FEW[0].build(tiny_base("llama-gqa")), learners.write

    def wrong(places, values):
        write(places, values)
        write([model.base.lm_head.weight], [model.base.lm_head.weight.roll(1, 0)])

    asked = [(prompt, {}) for prompt in prompts(12)]
    expected = [answer(model.base, prompt) for prompt, _ in asked]
    monkeypatch.setattr(learners, "write", wrong)
    texts, _ = served(model, asked, 5)
    assert texts[0] == expected and texts[-1] != expected


def learner_with(model, count=24, **settings):
    """A learner that knows some texts."""
    return offered(Learner(model, **settings), count)


def offered(learner, count=24):
    for prompt in prompts(count):
        learner.offer(prompt, answer(learner.model.base, prompt))
    return learner


def run(learner):
    while not learner.work():
        pass


def judged(monkeypatch, model, rate):
    """Tokens per step on each of some texts are what a function says of them, and of whether a copy is tried."""
    monkeypatch.setattr(
        Learner, "_rates", lambda self, texts, drafter: [rate(texts, drafter is not model.drafter)] * len(texts)
    )


@pytest.mark.parametrize("better", [False, True])
def test_weights_stay_only_where_tokens_per_step_rise(better, monkeypatch):
    model = FEW[0].build(tiny_base("llama-gqa"))
    learner, before = learner_with(model, steps=2), drafter_of(model)
    judged(monkeypatch, model, lambda texts, tried: 2.0 + (tried and (1 if better else -1)))
    while not learner.work():
        assert all(map(torch.equal, before, drafter_of(model))), "a trial writes nothing"
    assert all(map(torch.equal, before, drafter_of(model))) == (not better)
    assert (learner.taken, learner.rounds) == (int(better), 1)
    while learner.wants:  # where a round brings something, others follow without new texts
        run(learner)
    assert learner.rounds == (24 * MOST_ROUNDS // FRESH if better else 1)


def test_what_was_asked_earlier_is_not_forgotten_for_what_is_asked_now(monkeypatch):
    model = FEW[0].build(tiny_base("llama-gqa"))
    learner, before = learner_with(model, steps=2), drafter_of(model)
    earlier = [learner.texts.recent[0]] * LEAST_OF_A_KIND
    for text in earlier:
        learner.texts.keep(text, 5.9)
    judged(monkeypatch, model, lambda texts, tried: 2.0 if texts == earlier else 2.0 + tried)
    run(learner)
    assert all(map(torch.equal, before, drafter_of(model))) and learner.dropped == 1
    assert learner.rate == learner.first_rate / 2
    run(offered(learner))  # with twice as many texts as when it fell the rate is the first one again
    assert learner.dropped == 2 and learner.rate == learner.first_rate / 2


def optimized(module):
    """A step of an optimizer that torch counts as no write, as `Trainer` takes by default on a GPU."""
    for weight in module.parameters():
        weight.grad = torch.ones_like(weight)
    versions = [weight._version for weight in module.parameters()]
    torch.optim.AdamW(module.parameters(), 0.01, fused=True).step()
    assert [weight._version for weight in module.parameters()] == versions
    module.zero_grad()


def test_heads_are_not_held_to_what_they_had_before_the_base_moved(monkeypatch):
    model = FEW[0].build(tiny_base("llama-gqa"))
    learner = learner_with(model, 100, steps=2, held_out=16)
    earlier = [learner.texts.recent[0]] * LEAST_OF_A_KIND
    for text in earlier:
        learner.texts.keep(text, 5.9)
    judged(monkeypatch, model, lambda texts, tried: 2.0 if texts == earlier else 2.0 + tried)
    run(learner)
    assert (learner.taken, learner.dropped, learner.rate) == (0, 1, learner.first_rate / 2)
    optimized(model.base)
    run(learner)
    assert (learner.taken, learner.dropped, learner.rate) == (1, 1, learner.first_rate)
    texts = learner.texts
    assert len(texts.texts) == 64 and len(texts.recent) == 8
    assert texts.size == sum(len(text.ids) for text in texts.texts)
    run(learner)
    assert learner.taken == 2 and len(texts.texts) == 64


def test_heads_that_are_trained_while_they_learn_keep_what_they_were_trained_to(monkeypatch):
    model = FEW[0].build(tiny_base("llama-gqa"))
    learner = learner_with(model, steps=2)
    judged(monkeypatch, model, lambda texts, tried: 2.0 + tried)
    learner.work()
    optimized(model.drafter)
    trained = drafter_of(model)
    run(learner)
    assert all(map(torch.equal, trained, drafter_of(model))) and learner.taken == 0


def test_heads_that_were_trained_elsewhere_are_not_held_to_what_they_had(monkeypatch):
    model = FEW[0].build(tiny_base("llama-gqa"))
    learner, better = learner_with(model, steps=1), [2.0]
    judged(monkeypatch, model, lambda texts, tried: better[0])
    for _ in range(2):
        run(offered(learner))
    assert any(texts for texts in learner.texts.kept.values())
    better[0] = 1.5
    with torch.no_grad():
        next(model.drafter.parameters()).add_(1.0)
    run(offered(learner))
    assert all(value == 1.5 for texts in learner.texts.kept.values() for _, value in texts)


def test_of_two_learners_neither_overwrites_what_the_other_has_gained(monkeypatch):
    model = FEW[0].build(tiny_base("llama-gqa"))
    one, other = learner_with(model, steps=2), learner_with(model, steps=2)
    judged(monkeypatch, model, lambda texts, tried: 2.0 + tried)
    for _ in range(4):
        other.work()  # its copy learns from the weights as they are now
    run(one)
    gained = drafter_of(model)
    run(other)
    assert one.taken == 1 and other.taken == 0 and all(map(torch.equal, gained, drafter_of(model)))
    other.texts.fresh = 99
    run(other)
    assert other.taken == 1 and not all(map(torch.equal, gained, drafter_of(model)))


@pytest.mark.parametrize(
    "error, line",
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "there is no memory for the gradients"),
        (SystemExit("of a hook"), "SystemExit: of a hook"),
    ],
)
def test_an_error_while_weights_are_tried_ends_learning_alone(error, line, monkeypatch, caplog):
    model = FEW[0].build(tiny_base("llama-gqa"))
    before, rates, asked = drafter_of(model), Learner._rates, [(prompt, {}) for prompt in prompts(12)]

    def fails(self, texts, drafter):
        if drafter is not model.drafter:
            raise error
        return rates(self, texts, drafter)

    monkeypatch.setattr(Learner, "_rates", fails)
    expected = [answer(model.base, prompt) for prompt, _ in asked]
    texts, learner = served(model, asked, 4)
    assert texts == [expected] * 4 and learner.stopped == line
    assert all(map(torch.equal, before, drafter_of(model))) and not learner.wants


def test_fresh_heads_draft_after_some_requests():
    model = FEW[0].build(tiny_base("llama-gqa"))
    prompt, counts = prompts(1)[0], {}
    texts = [answer(model.base, prompt)] * 24
    for _ in range(4):
        counts = model.learn_from([prompt] * 24, texts, **({} if counts else {"learning_rate": 0.01}))
    assert counts["learning_first_tokens_per_step"] < 1.8 < 2.5 < counts["learning_tokens_per_step"]
    assert copy.deepcopy(model).learn_from([], [])["learning_rounds"] == 0
    assert pickle.loads(pickle.dumps(model)).__dict__["_learner"] is None


@pytest.mark.parametrize("everybody", [True, False])
def test_only_texts_that_clients_allow_are_learned_from(everybody, monkeypatch):
    model = FEW[0].build(tiny_base("llama-gqa"))
    asked = zip(prompts(3), ({"learn": allowed} for allowed in (None, True, False)))
    _, learner = served(model, [*asked], 1, everybody=everybody)
    assert learner.texts.seen == 1 + everybody
    noted = []
    monkeypatch.setattr(RecentTexts, "add", lambda self, *text: noted.append(text))
    (texts,), _ = served(model, [(prompt, {}) for prompt in prompts(12)], 1)
    assert sorted(text for _, text, _ in noted) == sorted(texts) and any(accepted for *_, accepted in noted)


def test_memory_is_bounded_and_a_flood_does_not_push_out_other_kinds():
    texts = RecentTexts(1000, held_out=4)
    for _ in range(LEAST_OF_A_KIND * EVERY):
        texts.add([5], [5] * 10, accepted=8)
    rare = list(texts.recent)[-LEAST_OF_A_KIND:]
    for number in range(2000):  # and no round meanwhile
        texts.add([3] * 700, [4] * (number % 90 + 4))
    new = texts.new()
    assert rare == new[:LEAST_OF_A_KIND] and len(new) == 2 * LEAST_OF_A_KIND
    for text in [*new, *new[-1:] * OF_A_KIND]:
        texts.keep(text, 2.4 if text in rare else 1.1)
    assert texts.size <= 1000 and len(texts.recent) == 4 and texts.seen == 2018 and texts.new() == []
    assert sum(len(text.ids) for text in texts.texts) == texts.size and len(texts.texts[-1].ids) == LONGEST
    (first, _), (second, _) = texts.kinds()
    assert first == rare and len(second) == OF_A_KIND
    for text in new[-1:] * 50:  # of the same kind: half of it stays
        texts.keep(text, 2.4)
    assert len(texts.kept) == 2 and next(texts.kinds())[0] == rare + new[-1:] * (OF_A_KIND - len(rare))
    row = texts.some(1)[0].row()
    assert (row["labels"] != -100).sum() == (row["input_ids"] == 4).sum()


def rows_read(model):
    """How many rows each forward of the base has, from now on."""
    read = []
    model.base.model.register_forward_hook(lambda _, __, output: read.append(len(output.last_hidden_state)))
    return read


@pytest.mark.parametrize("family", FEW, ids=lambda family: family.name)
def test_the_base_reads_a_text_once_and_little_is_kept(family):
    model = family.build(tiny_base("llama-gqa"))
    texts, read = list(learner_with(model).texts.texts), rows_read(model)
    readings = Readings(model.base, model.drafter, 1 << 20)
    readings.of(texts[:4])
    known = readings.of([texts[5], *texts[1:3]])
    assert read == [4, 1]
    for part, alone in zip(vars(known).values(), vars(readings.reader.read_texts(texts[1].ids[None].long())).values()):
        torch.testing.assert_close(part[1, : alone.shape[1]], alone[0])
    readings.limit = readings.size // 2
    readings.of(texts[6:8])
    assert list(readings.known)[-1] is texts[7] and readings.size <= readings.limit
    assert readings.size == sum(map(size_of, readings.known.values()))


def test_a_base_that_has_changed_reads_all_texts_again():
    model = FEW[0].build(tiny_base("llama-gqa"))
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), model.base)
    switch = adapter_layers(model.base)[0].enable_adapters
    learner, read = learner_with(model, steps=2), rows_read(model)
    hooked = functools.partial(model.base.model.norm.register_forward_hook, lambda _, __, output: output.flip(1))
    changes = [functools.partial(switch, False), functools.partial(optimized, model.base), hooked]
    for change, middle in itertools.product([list, *changes], (False, True)):
        run(learner)
        learner._readings.of([*learner.texts.texts, *learner.texts.recent])
        read.clear()
        if middle:
            learner.work()
        change()
        for _ in range(1 + middle):
            run(learner)
        assert (sum(read) > ROWS) == (change is not list), (change, middle)
        known, fresh = learner._readings, Readings(model.base, model.drafter, 1 << 20)
        for text in list(known.known):
            torch.testing.assert_close(known.of([text]).hidden, fresh.of([text]).hidden)
        switch(True)
    fresh = Readings(model.base, model.drafter, 1 << 20)
    for on, first in ((True, 0), (False, 2), (True, 4)):  # and back, between two reads
        switch(on)
        fresh.of(list(learner.texts.texts)[first : first + 3])
        assert len(fresh.known) == 3 and fresh.base_has_moved() == (first > 0)


def test_texts_are_learned_from_in_eval_mode_and_hold_tokens_of_the_base(monkeypatch):
    model, modes, asked = FEW[0].build(tiny_base("llama-gqa")).train(), [], prompts(48)
    judged(monkeypatch, model, lambda texts, tried: modes.append(model.drafter.training) or 2.0)
    model.learn_from(asked, asked, steps=2)
    model.learn_from(asked, asked, steps=2)
    assert model.__dict__["_learner"].texts.seen == 96 and modes and not any(modes) and model.drafter.training
    with pytest.raises(ValueError, match="^token -100 is none of the base's"):
        model.learn_from(asked[:1], [[-100] * 6])
    with pytest.raises(TypeError, match="^an answer is 5: expected a list of token ids"):
        model.learn_from(asked[:1], [5])
    with pytest.raises(ValueError, match="^1 prompts and 2 answers"):
        model.learn_from(asked[:1], asked[:2])
    assert model.__dict__["_learner"].texts.seen == 96


def quantized(model):
    weight = next(model.drafter.parameters())
    weight.requires_grad_(False)
    weight.data = weight.data.to(torch.int8)


def spread(model):
    model.base.get_output_embeddings().to("meta")


@pytest.mark.parametrize(
    "change, settings, line",
    [
        (quantized, {}, "the heads are quantized, and their weights cannot learn: load them without a quantizer."),
        (spread, {}, "the model is spread over several devices: heads learn where all of it is on one."),
        (None, {"share": 2}, "share is 2: expected the part of the time that learning takes, between 0 and 1."),
        (None, {"learning_rate": "x"}, "learning_rate is 'x': expected a rate, between 0 and 1."),
        (None, {"memory": None}, "memory is None: expected a whole number from 4096 on."),
        (None, {"everybody": "no"}, "everybody is 'no': expected True or False."),
    ],
)
def test_where_heads_cannot_learn_that_is_said_in_one_line(change, settings, line):
    model = FEW[0].build(tiny_base("llama-gqa", dtype=torch.float32))
    manager = model.init_continuous_batching(slots=2)
    if change:
        change(model)
    with pytest.raises(ValueError) as refused:
        manager.learn(**settings)
    assert str(refused.value) == line and manager.learner is None


def test_copies_of_the_text_have_nothing_to_learn():
    with pytest.raises(ValueError, match="'lookup' has nothing to train"):
        hf_drafthead.from_base(tiny_base("llama")).init_continuous_batching().learn()


def test_a_base_in_training_mode_ends_learning_in_one_line(caplog):
    model = FEW[0].build(tiny_base("llama-gqa"))
    learner = learner_with(model)
    model.base.train()
    with caplog.at_level(logging.WARNING):
        learner.between(1.0, idle=True)
    assert learner.stopped == "RuntimeError: the base is in training mode: call eval()."


def test_the_share_of_the_time_is_kept(monkeypatch):
    model = FEW[0].build(tiny_base("llama-gqa"))
    learner, clock = learner_with(model), iter(range(0, 10**6, 20))  # seconds of a piece
    monkeypatch.setattr(learners.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(Learner, "wants", True)
    monkeypatch.setattr(Learner, "work", lambda self: None)
    for _ in range(1000):
        learner.between(1.0)
    assert learner.served == 1000 and 0.08 < learner.spent / (learner.spent + learner.served) <= 0.1
    spent = learner.spent
    learner.between(0.0, idle=True)
    assert learner.spent == spent


def test_heads_that_have_learned_are_saved(tmp_path, monkeypatch):
    model = FEW[0].build(tiny_base("llama-gqa", dtype=torch.float32))
    model.base.save_pretrained(tmp_path / "base")
    model = type(model).from_base(tmp_path / "base", num_draft_heads=2)
    learner, before = learner_with(model, steps=2), drafter_of(model)
    judged(monkeypatch, model, lambda texts, tried: 2.0 + tried)
    run(learner)
    assert not all(map(torch.equal, before, drafter_of(model)))
    learner.save_pretrained(tmp_path / "heads")
    loaded = type(model).from_pretrained(tmp_path / "heads")
    assert all(map(torch.equal, drafter_of(model), drafter_of(loaded)))
