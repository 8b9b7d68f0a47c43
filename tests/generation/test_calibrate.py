"""Calibration: the entry that fits a call names its tree, and the text stays the base's own."""

import pytest
import torch
from transformers.utils import logging

from hf_drafthead.generation import calibrate as module
from hf_drafthead.generation.calibrate import CostCurve, calibrate, sampled_prompts, worth_of_trees
from hf_drafthead.generation.calibration import grow_tree_by_product
from hf_drafthead.generation.entries import matching, merged
from hf_drafthead.generation.tree import DraftTree
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES

PROMPTS = list(torch.randint(3, VOCABULARY, (6, 7), generator=torch.Generator().manual_seed(3)))
QUICK = {"new_tokens": 24, "max_nodes": 12}
GREEDY = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": False}


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(module, "COST_TOKENS", 6)
    monkeypatch.setattr(module, "COST_ROUNDS", 1)
    monkeypatch.setattr(module, "PRECISION", 0.2)


def family(name):
    return next(one for one in FAMILIES if one.name == name)


@pytest.fixture(scope="module")
def calibrated():
    """Hydra heads with entries for one row and for two, whose trees differ from each other and from `draft_tree`."""
    model = family("hydra").build(tiny_base("llama-gqa"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "COST_TOKENS", 6)
        patched.setattr(module, "COST_ROUNDS", 1)
        patched.setattr(module, "PRECISION", 0.2)
        kept = []
        entries = calibrate(model, PROMPTS, batch_sizes=(1, 2), keep=kept.append, **QUICK)
    assert entries == kept == model.generation_config.calibration
    for entry, paths in zip(entries, ([[0], [0, 0]], [[0], [1], [2]])):
        entry["tree"] = paths
    model.generation_config.draft_tree = [[0], [0, 0], [0, 0, 0], [1]]
    return model


def drafted(model, rows, **call):
    """Nodes of every step of a call whose text is the base's own."""
    prompts, nodes = torch.stack(PROMPTS[:rows]), set()
    text = model.generate(
        prompts, **{**GREEDY, **call}, on_step=lambda record: nodes.add(record.drafted) if record.step else None
    )
    assert torch.equal(text, model.base.generate(prompts, **GREEDY))
    return nodes


@pytest.fixture
def notices():
    told = []

    class Handler(logging.logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    handler = Handler()
    logger = logging.logging.getLogger("hf_drafthead")
    logger.addHandler(handler)
    yield told
    logger.removeHandler(handler)


def test_an_entry_says_what_was_measured(calibrated):
    first = calibrated.generation_config.calibration[0]
    assert (first["device"], first["dtype"], first["batch_size"], first["captured"]) == ("cpu", "float64", 1, False)
    assert len(first["heads_hash"]) == 16
    measured = first["measured"]
    assert measured["identical"] and measured["method"] == "paths" and measured["prompts"] == 6
    assert 1 <= measured["tokens_per_step"] < 5 and 1 <= measured["predicted_tokens_per_step"] < 5
    assert all(seconds > 0 for _, seconds in measured["step_seconds"])
    assert [nodes for nodes, _ in measured["tokens_per_step_by_nodes"]] == [2, 3, 4, 5, 6, 8, 10, 12]


def test_a_call_takes_the_entry_that_fits_and_else_its_tree_with_one_notice(calibrated, notices):
    assert drafted(calibrated, 1) == {3} and drafted(calibrated, 2) == {4}
    assert notices == []
    assert drafted(calibrated, 3) == {5} and drafted(calibrated, 3) == {5}
    assert len(notices) == 1 and "batch size 3" in notices[0] and "draft_tree is used" in notices[0]
    assert drafted(calibrated, 1, draft_tree=[[0]]) == {2}


def test_entries_are_saved_and_loaded_and_belong_to_their_heads(calibrated, tmp_path, notices):
    calibrated.save_pretrained(tmp_path)
    loaded = type(calibrated).from_pretrained(tmp_path, base_model=calibrated.base)
    assert drafted(loaded, 1) == {3} and notices == []
    with torch.no_grad():
        next(loaded.drafter.parameters()).mul_(2)
    assert drafted(loaded, 1) == {5}
    assert len(notices) == 1


def test_without_entries_there_is_no_notice(notices):
    model = family("medusa").build(tiny_base("llama-gqa"))
    model.generation_config.draft_tree = [[0]]
    assert drafted(model, 1) == {2} and notices == []


@pytest.mark.parametrize(
    "tree, line",
    [
        ([[0]] * 1_000_000, "more than 4,096 nodes"),
        ([[0] * 100_000], "a path of 100,000 ranks"),
        ([[0, 0]], "has no parent"),
        ([[VOCABULARY]], "has ranks 0 to"),
        ("mc_sim_7b_63", "its tree is of type str"),
        (None, "its tree is of type NoneType"),
    ],
    ids=["nodes", "depth", "orphan", "rank", "name", "none"],
)
def test_a_damaged_entry_is_refused_in_one_line(calibrated, tree, line, monkeypatch):
    entry = {**calibrated.generation_config.calibration[0], "tree": tree}
    monkeypatch.setattr(calibrated.generation_config, "calibration", [entry])
    with pytest.raises(ValueError, match="the calibration entry for cpu, batch size 1, is damaged") as refused:
        drafted(calibrated, 1)
    assert line in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 500


def test_a_new_entry_replaces_the_one_of_its_situation_and_those_of_other_heads():
    def entry(heads="a", size=1, dtype="float32"):
        return {"device": "cpu", "dtype": dtype, "batch_size": size, "captured": False, "heads_hash": heads}

    other_dtype, other_size = entry("b", dtype="float16"), entry("a", 2)
    assert merged([entry("b"), entry("a"), other_size, other_dtype], {**entry(), "new": 1}) == [
        other_size,
        other_dtype,
        {**entry(), "new": 1},
    ]
    assert matching([{}, {"device": 3}], module.Situation("cpu", "float32", 1, False, "a")) is None


def test_what_is_there_is_not_measured_again(calibrated, monkeypatch):
    monkeypatch.setattr(module, "own_texts", None)
    stored = calibrated.generation_config.calibration
    assert calibrate(calibrated, PROMPTS, batch_sizes=(2, 1), resume=True) == [stored[1], stored[0]]


def test_captured_steps_have_entries_of_their_own(monkeypatch):
    model = family("medusa").build(tiny_base("llama-gqa"))
    asked = []

    def noted(self, *args, **call):
        asked.append(call.pop("cache_implementation", None))
        return generate(self, *args, **call)

    generate = type(model).generate
    monkeypatch.setattr(type(model), "generate", noted)
    monkeypatch.setattr(module, "CHECKED", 1)
    monkeypatch.setattr(module, "COSTED", ())
    (entry,) = calibrate(model, PROMPTS, captured=True, new_tokens=24, max_nodes=3)
    assert entry["captured"] and set(asked[1:]) == {"static"} and asked[0] is None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_predicted_tokens_per_step_are_those_of_generate(temperature):
    model = family("eagle").build(tiny_base("llama-gqa"))
    prompts = list(torch.randint(3, VOCABULARY, (16, 5), generator=torch.Generator().manual_seed(4)))
    worth = worth_of_trees(model, prompts, 40, 16, temperature, eos_token_id=None)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    others = torch.randint(3, VOCABULARY, (24, 5), generator=torch.Generator().manual_seed(5))
    lengths = model.generate(
        others, max_new_tokens=40, eos_token_id=None, draft_tree=worth.tree(16), return_dict_in_generate=True,
        **sampling,
    ).accepted_lengths  # fmt: skip
    measured = float(lengths[lengths > 0].double().mean())
    assert worth.tokens_per_step[16] == pytest.approx(measured, rel=0.05) and measured > 1.1


def test_no_tree_is_grown_beyond_the_tokens_that_the_heads_choose_among(monkeypatch):
    monkeypatch.setattr(module, "PRECISION", 1.0)
    model = family("eagle3").build(tiny_base("llama-gqa"), draft_vocab_size=20)
    worth = worth_of_trees(model, PROMPTS, 24, 60, eos_token_id=None)
    assert worth.paths and max(map(max, worth.paths)) < 20


def test_medusa_s_product_takes_the_heads_as_independent():
    # head 1: rank 0 in 3 of 4, rank 1 in 1; head 2: rank 0 in half, ranks 1 and 2 in a quarter each
    ranks = torch.tensor([[0, 1], [0, 2], [0, 0], [1, 0]])
    # (0,) 3/4, (0, 0) 3/8, (1,) 1/4, (0, 1) 3/16, (0, 2) 3/16, (1, 0) 1/8, (1, 1) 1/16, (1, 2) 1/16
    expected = [(0,), (0, 0), (1,), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert grow_tree_by_product(ranks, 9) == grow_tree_by_product(ranks, 50) == expected
    for nodes in range(2, 10):
        assert DraftTree(grow_tree_by_product(ranks, nodes)).num_nodes == nodes


def test_the_curve_never_falls():
    curve = CostCurve.through([(16, 3.0), (2, 2.0), (8, 1.0), (4, 3.0)])
    assert curve.points == [(2, 2.0), (4, 2.0), (8, 2.0), (16, 3.0)]
    assert [curve.at(nodes) for nodes in (1, 6, 12, 64)] == [2.0, 2.0, 2.5, 3.0]


def test_prompts_that_the_base_samples_by_itself():
    model = family("medusa").build(tiny_base("llama-gqa"))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    prompts = sampled_prompts(model, 5, 9)
    assert torch.equal(torch.get_rng_state(), state)
    assert [len(prompt) for prompt in prompts] == [9] * 5 and len({tuple(p.tolist()) for p in prompts}) == 5


@pytest.mark.parametrize(
    "prompts, call, line",
    [
        ([], {}, "there is no prompt to calibrate on"),
        ([torch.tensor([], dtype=torch.long)], {}, "prompt 1 is empty"),
        ([PROMPTS[0], torch.ones(100_000, dtype=torch.long)], {}, "prompt 2 has 100000 tokens, which with 24 new ones"),
        (PROMPTS[:1], {"new_tokens": 3}, "1 prompts are too few: their 0 steps tell"),
        (PROMPTS, {"max_nodes": 1}, "max_nodes is 1: expected 2"),
        (PROMPTS, {"max_nodes": 10**6}, "max_nodes is 1000000: expected 2 (the root and one guess) to 4,096"),
        (PROMPTS, {"batch_sizes": (0,)}, "batch_sizes is [0]"),
        (PROMPTS, {"temperature": -1.0}, "temperature is -1.0: expected a number above 0, or 0 for greedy decoding"),
        (PROMPTS, {"method": "luck"}, "method is 'luck': expected one of paths, product"),
    ],
    ids=["none", "empty", "long", "few", "small", "large", "rows", "temperature", "method"],
)
def test_bad_input_is_refused_in_one_line(prompts, call, line):
    model = family("medusa").build(tiny_base("llama-gqa"))
    with pytest.raises(ValueError) as refused:
        calibrate(model, prompts, **{**QUICK, **call})
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_too_few_prompts_are_told_how_many_are_needed(monkeypatch):
    monkeypatch.setattr(module, "PRECISION", 0.001)
    model = family("eagle").build(tiny_base("llama-gqa"))
    with pytest.raises(ValueError, match=r"6 prompts are too few: their \d+ steps .* needs about \d{2,} prompts"):
        calibrate(model, PROMPTS, **QUICK)
