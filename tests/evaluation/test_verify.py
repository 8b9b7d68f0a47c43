"""`verify` passes a model that is exact, finds planted faults, and distinguishes rounding from faults."""

import contextlib

import pytest
import torch

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.evaluation import rounding
from hf_drafthead.evaluation.measurement import identity
from hf_drafthead.evaluation.verify import groups, verify
from hf_drafthead.generation import entry, noise, rules
from hf_drafthead.trees.costs import NodeCosts, StepCosts
from hf_drafthead.trees.rank_paths import left_padded
from tests.bases import tiny_base
from tests.checkpoints import byte_tokenizer
from tests.families import FAMILIES
from tests.planted import overshoot_past_the_end, phantom_token

# Few tokens and a wide tree: random heads guess right often enough to walk down, and wrong often enough to stop.
VOCABULARY = 12
TREE = [[0], [1], [2], [3], [0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [3, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0]]
PROMPTS = [[5, 9, 3, 8, 11, 4, 7], [6, 10, 3], [4], [9, 9, 3, 4, 8]]
SETTINGS = {"repetition_penalty": 3.0, "no_repeat_ngram_size": 2}


@pytest.fixture(scope="module")
def model():
    model = FAMILIES[0].build(tiny_base("llama-gqa", vocab_size=VOCABULARY))
    model.generation_config.draft_tree = TREE
    model.generation_config.eos_token_id = model.base.generation_config.eos_token_id = None
    return model


def verdict_of(model, **options):
    return verify(model, PROMPTS, **{"max_new_tokens": 10, "batch_size": 3, **options})


def test_an_exact_model_passes_every_check(model):
    calls, totals = [], []

    @contextlib.contextmanager
    def bar(total):
        totals.append(total)
        yield lambda name: lambda: calls.append(name)

    found = verdict_of(model, settings=SETTINGS, bar=bar)
    assert not found.differences and found.shortest is None
    names = [check.name for check in found.checks]
    alone = ["greedy", "sampled", "end of text"]
    assert names[:6] == [*alone, *(f"{name}, batches of 3" for name in alone)]
    assert names[6] == "greedy with repetition_penalty=3.0, no_repeat_ngram_size=2"
    assert all(check.texts >= len(PROMPTS) and not check.undrafted for check in found.checks)
    assert [len(calls)] == totals == [2 * 3 * (4 + 2)]
    report = found.to_json(byte_tokenizer())
    assert report["identical"] is True and report["shortest"] is None
    seen = {"name": "greedy", "texts": 4, "same": 4, "calls": 4, "largest_margin": None}
    nothing = dict.fromkeys(("near_ties", "different", "undrafted_calls", "texts_with_other_scores"), 0)
    assert report["checks"][0] == {**seen, **nothing}
    assert report["heads_hash"] == identity(model)["heads_hash"] and "base_revision" in report


def wrong_row_s_cache(patch):
    keep = SlotCache.keep
    patch.setattr(SlotCache, "keep", lambda self, nodes, counts: keep(self, nodes.flip(0), counts))


def wrong_position(patch):
    nodes = BaseReader.nodes

    def shifted(self, tokens, topology, cache, positions, visible):
        return nodes(self, tokens, topology, cache, positions + (topology.depths > 0), visible)

    patch.setattr(BaseReader, "nodes", shifted)


def processor_skipped(patch):
    patch.setattr(rules.Rules, "_process", lambda self, rows, logits, sequences, lengths: logits)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "plant, found_by, passes",
    [
        (phantom_token, "greedy", "sampled"),
        (overshoot_past_the_end, "end of text", "greedy"),
        (wrong_row_s_cache, "greedy, batches of 3", "greedy"),
        (wrong_position, "sampled", None),
        (processor_skipped, "greedy with repetition_penalty=3.0, no_repeat_ngram_size=2", "greedy"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_planted_fault_is_found(model, monkeypatch, plant, found_by, passes):
    model._base_reader()  # probed while all is well
    plant(monkeypatch)
    found = verdict_of(model, settings=SETTINGS if plant is processor_skipped else None)
    faults = {check.name: len(check.faults) for check in found.checks}
    report = found.to_json(byte_tokenizer())
    assert not report["identical"] and not report["passed"]
    assert faults[found_by] > 0
    assert passes is None or faults[passes] == 0
    assert len(found.shortest.prompt) == min(len(one.prompt) for check in found.checks for one in check.faults)


def test_a_generator_that_is_left_elsewhere_is_found(model, monkeypatch):
    monkeypatch.setattr(noise.RandomNumbers, "close", lambda self: None)
    found = verdict_of(model)
    assert {check.name for check in found.checks if check.faults} == {"sampled", "sampled, batches of 3"}


def test_what_the_base_decoded_by_itself_is_told(model, monkeypatch):
    def refuse(*arguments):
        raise Unsupported("no reason")

    monkeypatch.setattr(entry, "check_call", refuse)
    found = verdict_of(model)
    assert [check.undrafted for check in found.checks] == [4, 4, 4, 2, 2, 2]
    assert [check.calls for check in found.checks] == [4, 4, 4, 2, 2, 2]
    assert found.unverified == [check.name for check in found.checks] and not found.to_json(None)["passed"]


def test_a_check_guesses_though_steps_cost_too_much_for_a_call_to_do_so(model, monkeypatch):
    monkeypatch.setattr(StepCosts, "__call__", lambda self, trees: NodeCosts(dict.fromkeys(trees, 9.0)))
    found = verdict_of(model)
    assert [check.undrafted for check in found.checks] == [0] * 6 and all(check.guessing for check in found.checks)
    assert found.to_json(None)["passed"] and found.unverified == []


def test_texts_of_one_token_verify_nothing(model):
    found = verdict_of(model, max_new_tokens=1)
    assert [check.undrafted for check in found.checks] == [0] * 6 and len(found.unverified) == 6


@pytest.mark.parametrize(
    "settings", [{}, {"do_sample": True, "top_p": 0.9, "temperature": 0.7}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_margin_is_what_parts_the_tokens(model, settings, rows):
    given = left_padded(model, [torch.tensor(prompt) for prompt in PROMPTS[:rows]])
    call = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None, **settings}
    torch.manual_seed(3)
    answers = model.base.generate(**given, **call)[:, given["input_ids"].shape[1] :].tolist()
    made = rounding.BaseCall(model.base, given, call, 3)
    for row, answer in enumerate(answers):
        own = made.margin(row, answer[:4], answer[4])
        assert own[0] == 0.0  # no disturbance makes the base choose its own token
        others = [made.margin(row, answer[:4], token)[0] for token in range(VOCABULARY) if token != answer[4]]
        assert min(others) > own[1]  # a random model is never undecided within rounding
    if not settings and rows == 1:
        prefix = torch.tensor([PROMPTS[0] + answers[0][:4]])
        best, second = model.base(prefix).logits[0, -1].float().topk(2)[0].tolist()
        assert min(others) == pytest.approx(best - second, rel=1e-3)


def test_a_tie_that_rounding_decides_is_no_fault(monkeypatch):
    base = tiny_base("llama-gqa", vocab_size=VOCABULARY, dtype=torch.bfloat16)
    with torch.no_grad():  # tokens 3 and 4 tie for ever, and the base takes the first
        base.lm_head.weight[4] = base.lm_head.weight[3]
        base.lm_head.weight[5:] = base.lm_head.weight[3] * 0.5
        base.lm_head.weight[:3] = base.lm_head.weight[3] * 0.25
    model = FAMILIES[0].build(base)
    model.generation_config.draft_tree = TREE
    model.generation_config.eos_token_id = model.base.generation_config.eos_token_id = None
    nodes = BaseReader.nodes

    def rounded_otherwise(self, *arguments):
        logits, features = nodes(self, *arguments)
        logits[..., 4] += logits[..., 4].abs() * torch.finfo(torch.bfloat16).eps
        return logits, features

    model._base_reader()
    monkeypatch.setattr(BaseReader, "nodes", rounded_otherwise)
    found = verdict_of(model, max_new_tokens=8, batch_size=2)
    ties = found.differences
    assert ties and all(tie.near_tie for tie in ties)
    texts = sum(check.texts for check in found.checks)
    assert found.in_words().startswith(f"{texts - len(ties)} of {texts} texts are the same, {len(ties)} differ from a ")
    assert found.in_words().endswith("in the logits). The checks of exactness are --exact and --dtype float32.")
    report = found.to_json(byte_tokenizer())
    assert (report["identical"], report["passed"], report["differences"]["faults"]) == (False, True, 0)
    assert report["differences"]["rounding"] == len(ties)
    assert {(tie.base, tie.heads) for tie in ties if "sampled" not in tie.check} <= {(3, 4), (4, 3)}
    assert max(tie.margin for tie in ties) < 1.0


def test_groups_need_padding_and_are_full():
    for prompts in (PROMPTS, PROMPTS[:1], [[3]]):
        found = list(groups(prompts, 3))
        assert all(len(group) == 3 for group in found)
        assert all(any(prompt in group for group in found) for prompt in prompts)
    assert len({len(prompt) for prompt in list(groups(PROMPTS, 3))[0]}) > 1
