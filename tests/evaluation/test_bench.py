"""`bench` measures what `generate` does, asks every turn after the base's own answers, and keeps what it has."""

import copy
import dataclasses
import functools
import time
import types

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from hf_drafthead.cli import common
from hf_drafthead.evaluation import bench as benching
from hf_drafthead.evaluation import calls, measurement, report, rounding
from hf_drafthead.evaluation.bench import bench
from hf_drafthead.evaluation.loading import load
from hf_drafthead.evaluation.questions import Question
from hf_drafthead.generation import StepRecord, step
from hf_drafthead.generation.batch import Batch
from hf_drafthead.generation.mixin import DraftHeadGenerationMixin
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.trees.entries import CalibrationKey
from tests.checkpoints import TREE, save_base, save_heads

TREE = DraftTree(TREE)
GREEDY = {"do_sample": False, "max_new_tokens": 10}
PROMPTS = [Question((text,), kind) for text, kind in [("def t", "x"), ("more w", "y"), ("q", "x"), ("A", "x")]]
TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
CHATS = [
    Question(("ab", "cd"), "x", chat=True, where="q line 1"),
    Question(("e",), "x", chat=True, where="q line 2"),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    model, tokenizer = load(str(save_heads(folder, save_base(folder), "medusa")))
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer


def measured(loaded, questions=PROMPTS, settings=GREEDY, **options):
    return bench(*loaded, questions, settings, **{"tree": TREE, "repeats": 1, **options})


def test_tokens_per_step_are_exactly_those_of_accepted_lengths(loaded):
    model, tokenizer = loaded
    emitted = steps = 0
    for prompt in PROMPTS:
        given = calls.encode(model, tokenizer, [prompt.text])
        lengths = model.generate(**given, **GREEDY, draft_tree=TREE, return_dict_in_generate=True).accepted_lengths
        emitted, steps = emitted + int(lengths.sum()), steps + int((lengths > 0).sum())
    run = benching.BenchRun(*loaded, calls.decoding_methods(*loaded, tree=TREE), GREEDY, repeats=3)
    for one in run.run(PROMPTS[:2]):
        assert {name: len(each.seconds) for name, each in one.runs.items()} == {"base": 3, "heads": 3}
    (found,) = measured(loaded, repeats=2)
    assert found.tokens_per_step == emitted / steps > 1
    assert found.identical and found.complete and found.stopped is None
    assert found.tree_nodes == TREE.num_nodes
    assert found.prompts == 4 and found.new_tokens == 40
    assert found.speedup_spread[0] <= found.speedup_spread[1]
    split = found.time_split
    assert split["step"] == pytest.approx(sum(split[part] for part in ("draft", "verify", "walk", "commit", "rest")))


def test_a_batch_counts_each_row_by_itself(loaded):
    (alone,) = measured(loaded)
    (batch,) = measured(loaded, batch_sizes=[3])
    assert batch.identical
    assert (batch.prompts, batch.new_tokens) == (alone.prompts, alone.new_tokens)
    assert batch.tokens_per_step == alone.tokens_per_step


def test_a_row_counts_up_to_its_own_end_of_sequence(loaded):
    model, tokenizer = loaded
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    inputs = {"input_ids": torch.tensor([[9, 9], [9, end]])}
    sequences = torch.tensor([[9, 9, 7, end, pad, pad], [9, end, 7, 7, 7, 7]])
    assert calls.new_rows(model, inputs, sequences) == [[7, end], [7, 7, 7, 7]]
    assert calls.new_rows(model, inputs, sequences, {"eos_token_id": [7]}) == [[7], [7]]


@pytest.mark.parametrize(
    "prompts, options, text",
    [
        ([], {}, "there is no prompt to measure on: give at least one."),
        ([Question(("",))], {}, "the prompt is empty: give the text to continue."),
        (PROMPTS, {"batch_sizes": [0]}, "batch_size is 0: expected at least 1."),
        (PROMPTS, {"settings": {"max_new_tokens": 124}}, "a prompt of 5 tokens and 124 new ones exceed the base's 128"),
    ],
)
def test_what_cannot_be_measured_is_refused(loaded, prompts, options, text):
    with pytest.raises(ValueError) as refused:
        measured(loaded, prompts, **options)
    assert text in str(refused.value)


@pytest.mark.parametrize("pad", ["none", "one that the base does not embed"])
def test_a_batch_needs_no_pad_token_that_the_base_embeds(loaded, pad):
    model, tokenizer = loaded[0], copy.deepcopy(loaded[1])
    tokenizer.pad_token = None
    config = copy.deepcopy(model.base.generation_config)
    if pad != "none":
        tokenizer.add_special_tokens({"pad_token": "<padding>"})
        assert tokenizer.pad_token_id == len(model.base.get_input_embeddings().weight)
        config.pad_token_id = tokenizer.pad_token_id
    encoded = calls.encode(model, tokenizer, ["a", "bc"])
    assert encoded["attention_mask"].tolist() == [[0, 1], [1, 1]]
    letters = dict(zip("abcdefgh", tokenizer("abcdefgh")["input_ids"]))
    ends = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": [letters["f"]]}  # the second row ends first
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.base, "generation_config", config)
        patch.setattr(model, "generation_config", config)
        methods = calls.decoding_methods(model, tokenizer)
        base, heads = (methods[name](encoded, ends) for name in (calls.BASE, calls.HEADS))
    assert torch.equal(base, heads.sequences)
    assert tokenizer.decode(base[1, 2:5]) == "def"


@pytest.mark.parametrize("single", ["$A </s>", "<s> $A </s>", "<s> $A </s> <pad>", "<s> $A"])
def test_what_a_tokenizer_adds_behind_a_text_is_not_put_behind_a_prompt(loaded, single):
    model, tokenizer = loaded[0], copy.deepcopy(loaded[1])
    named = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>", "<pad>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=named)
    before = [tokenizer.bos_token_id] if single.startswith("<s>") else []
    for text in ("abc", "ab</s>"):  # what the text itself ends with stays
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert calls.encode(model, tokenizer, [text])["input_ids"].tolist() == [before + plain]
        assert calls.encode(model, tokenizer, [text], special_tokens=False)["input_ids"].tolist() == [plain]


def test_a_token_that_the_base_does_not_embed_is_named(loaded):
    model, tokenizer = loaded[0], copy.deepcopy(loaded[1])
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match="the prompt has the token '<new>', number 259 of the tokenizer, but the base"):
        calls.encode(model, tokenizer, ["ab<new>"])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "settings", [GREEDY, {"do_sample": True, "temperature": 2.0, "max_new_tokens": 10}], ids=["greedy", "sampled"]
)
def test_rounding_is_told_from_a_fault_by_the_margin(loaded, monkeypatch, settings):
    right = DraftHeadGenerationMixin.generate

    def other_last_token(self, **kwargs):
        output = right(self, **kwargs)
        output.sequences[0, -1] += 1
        return output

    monkeypatch.setattr(DraftHeadGenerationMixin, "generate", other_last_token)
    (found,) = measured(loaded, settings=settings)
    counts = {"texts": 4, "rounding": 0, "faults": 4, "largest_margin": None}
    assert not found.identical and found.differences == counts and report.same_text(found) == "NO"
    assert found.per_category["x"]["differences"]["faults"] == 3
    monkeypatch.setattr(rounding, "ROUNDING_STEPS", 1e12)  # whatever differs is a near tie
    (found,) = measured(loaded, settings=settings)
    assert not found.identical and (found.differences["rounding"], found.differences["faults"]) == (4, 0)
    assert report.same_text(found) == "rounding (4 of 4)" and found.differences["largest_margin"] > 0
    (sentence,) = report.verdicts([found])
    assert "0 of 4 texts are the same, 4 differ from a near tie on (largest margin " in sentence
    (lossy,) = measured(loaded, settings=settings, acceptance={"acceptance": "typical"})
    assert lossy.differences["rounding"] == lossy.differences["faults"] == 0


def test_a_verdict_says_what_a_speedup_means(loaded):
    (found,) = measured(loaded, PROMPTS[:1])
    for speedup, words in (
        (1.8, "medusa: 1.80x: faster than the base."),
        (1.02, "medusa: 1.02x: as fast as the base; calibrate (`hf-drafthead calibrate`), or --captured."),
        (0.65, "medusa: 0.65x: slower than the base; calibrate (`hf-drafthead calibrate`), or --captured."),
    ):
        assert report.verdicts([dataclasses.replace(found, speedup=speedup)]) == [words]
    calibrated = dataclasses.replace(found, speedup=1.02, calibrated=True)
    told = "medusa: 1.02x: as fast as the base, with the tree that was calibrated here; try --captured."
    assert report.verdicts([calibrated]) == [told]
    paused = dataclasses.replace(found, speedup=1.8, tree_nodes=8, drafting_share=0.25, tokens_per_drafting_step=1.5)
    drafting = "25 % of the steps drafted 8 nodes and emitted 1.50 tokens each, the others 1."
    assert report.verdicts([paused]) == [f"medusa: 1.80x: faster than the base. {drafting}"]
    captured = dataclasses.replace(found, speedup=0.65, captured=True, dtype="bfloat16")
    (told,) = report.verdicts([captured])
    assert told.endswith("calibrate (`hf-drafthead calibrate`). The check of exactness is --dtype float32.")


def test_a_measurement_knows_whether_its_calls_were_calibrated(loaded, monkeypatch):
    model = loaded[0]
    key = CalibrationKey.of(model.base, model.drafter, 1, "eager")
    monkeypatch.setattr(model.generation_config, "calibration", [{**key._asdict(), "tree": [[0]]}], raising=False)
    (one,), (two,) = measured(loaded, PROMPTS[:1]), measured(loaded, PROMPTS[:1], batch_sizes=[2])
    assert one.calibrated and not two.calibrated


@pytest.mark.parametrize("stage", measurement.STAGES)
def test_a_stage_s_time_is_told_under_its_name(loaded, monkeypatch, stage):
    clock = types.SimpleNamespace(now=0.0)
    holder = Batch if stage == "walk" else step.Stages
    right = getattr(holder, stage)

    def slow(*arguments, **kwargs):
        clock.now += 0.25
        return right(*arguments, **kwargs)

    monkeypatch.setattr(step, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(holder, stage, slow)
    of_calls = functools.partial(benching.time_interleaved, clock=lambda device: time.perf_counter())
    monkeypatch.setattr(benching, "time_interleaved", of_calls)
    (found,) = measured(loaded, PROMPTS[:1])
    others = dict.fromkeys([*measurement.STAGES, "rest"], 0.0)
    assert found.time_split == {**others, stage: 250.0, "step": 250.0}


def test_of_a_captured_step_only_the_whole_is_timed(loaded):
    split = measurement.time_split([StepRecord(1, [[5]], [[0]], [1], 8, {"step": 0.5})])
    assert split == {"step": 500.0} and measurement.time_split([]) is None


def undrafted_where(monkeypatch, length):
    """The base decodes by itself where a prompt has so many tokens; any number if None."""
    right = DraftHeadGenerationMixin.generate

    def falling_back(self, **kwargs):
        output = right(self, **kwargs)
        if length in (None, kwargs["input_ids"].shape[1]):
            output.accepted_lengths = None
        return output

    monkeypatch.setattr(DraftHeadGenerationMixin, "generate", falling_back)


def test_calls_that_the_base_decoded_are_counted_and_told(loaded, monkeypatch):
    undrafted_where(monkeypatch, len("def t"))
    notices = []
    (found,) = measured(loaded, notify=notices.append)
    assert found.undrafted == 1 and found.to_json()["undrafted"] == 1 and found.tokens_per_step > 1
    assert {name: part["undrafted"] for name, part in found.per_category.items()} == {"x": 1, "y": 0}
    told = "1 of 4 calls were decoded by the base itself, which counts in the speedup and not in the tokens per step."
    assert notices == found.notices == [told] and report.same_text(found) == "yes"
    undrafted_where(monkeypatch, None)
    (found,) = measured(loaded)
    assert found.undrafted == 4 and found.tokens_per_step is None and report.same_text(found) == "-"


def test_how_hot_it_was_is_told_also_where_only_the_base_says_so(loaded, monkeypatch):
    config = loaded[0].base.generation_config
    assert benching.full_settings(loaded[0], {"max_new_tokens": 4}) == {"do_sample": False, "max_new_tokens": 4}
    assert benching.full_settings(loaded[0], {"do_sample": True})["temperature"] == 1.0
    monkeypatch.setattr(config, "temperature", 0.6)
    monkeypatch.setattr(config, "do_sample", True)
    assert benching.full_settings(loaded[0], {}) == {"do_sample": True, "temperature": 0.6}
    assert benching.full_settings(loaded[0], {"temperature": 0.9})["temperature"] == 0.9
    (found,) = measured(loaded, PROMPTS[:1], {"do_sample": True, "max_new_tokens": 4})
    assert found.settings == {"do_sample": True, "max_new_tokens": 4, "temperature": 0.6}


def test_the_model_s_own_tree_is_counted_as_it_is_used(loaded):
    (found,) = measured(loaded, PROMPTS[:1], tree=None)
    assert found.tree_nodes == min(TREE.num_nodes, 12)  # without an entry a CPU takes no more nodes


def test_a_later_turn_follows_the_base_s_own_answer(loaded, monkeypatch):
    model, tokenizer = loaded
    asked = []
    generate = type(model.base).generate

    def listening(self, *arguments, **kwargs):
        if "custom_generate" not in kwargs:
            asked.append(tokenizer.batch_decode(kwargs["input_ids"], skip_special_tokens=True))
        return generate(self, *arguments, **kwargs)

    monkeypatch.setattr(type(model.base), "generate", listening)
    (found,) = measured(loaded, CHATS, batch_sizes=[2])
    first = calls.encode(model, tokenizer, ["<ab>"], special_tokens=False)
    answer = tokenizer.decode(generate(model.base, **first, **GREEDY)[0, 4:])
    assert asked[-1] == [f"<ab><{answer.strip()}><cd>"]
    assert found.prompts == 3 and found.batch_size == 2  # the second conversation has one turn


def test_a_later_turn_without_room_is_left_out_and_told(loaded):
    notices = []
    settings = {**GREEDY, "max_new_tokens": 60}
    (found,) = measured(loaded, CHATS, settings, notify=notices.append)
    told = "q line 1: turn 2 is left out, its 70 tokens leave no room in the base's positions."
    assert found.prompts == 2 and notices == found.notices == [told]


def test_sampling_from_the_same_seed_gives_the_same_text(loaded):
    settings = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 10}
    (found,) = measured(loaded, settings=settings, batch_sizes=[2], seed=3)
    assert found.identical and found.settings == settings


def test_typical_acceptance_is_measured_as_lossy(loaded, monkeypatch):
    acceptance = {"acceptance": "typical", "posterior_threshold": 0.1, "posterior_alpha": 0.3}
    settings = {**GREEDY, "do_sample": True, "temperature": 0.01}
    (found,) = measured(loaded, [Question(("abc",), "x")], settings, acceptance=acceptance)
    assert not found.lossless and found.acceptance == acceptance
    model, _ = loaded  # and what the model is set to is told
    monkeypatch.setattr(model.generation_config, "acceptance", "typical", raising=False)
    monkeypatch.setattr(model.generation_config, "posterior_threshold", 0.2, raising=False)
    assert benching.acceptance_of(model, {}) == {"acceptance": "typical", "posterior_threshold": 0.2}
    assert benching.acceptance_of(model, {"acceptance": "exact"}) == {"acceptance": "exact"}


def out_of_memory_above(rows: int, monkeypatch, calls_before: int = 0):
    right, calls = DraftHeadGenerationMixin.generate, []

    def limited(self, *arguments, **kwargs):
        calls.append(0)
        if kwargs["input_ids"].shape[0] > rows and len(calls) > calls_before:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return right(self, *arguments, **kwargs)

    monkeypatch.setattr(DraftHeadGenerationMixin, "generate", limited)


def test_where_the_memory_runs_out_what_was_measured_is_kept(loaded, monkeypatch):
    out_of_memory_above(1, monkeypatch, calls_before=3)  # the warm-up, and one round of two calls
    questions = [dataclasses.replace(prompt, category="x") for prompt in PROMPTS]
    (some,) = measured(loaded, questions, batch_sizes=[2, 1])
    assert (some.batch_size, some.prompts, some.complete, some.stopped) == (2, 2, False, "out of memory")
    whole = measured(loaded, questions, batch_sizes=[1, 2])[-1]
    assert (whole.batch_size, whole.prompts, whole.complete, whole.stopped) == (1, 4, True, "out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        measured(loaded, questions, batch_sizes=[2])


def test_an_interruption_ends_the_plan_and_is_told(loaded, monkeypatch):
    warm_up, begun, kept = benching.BenchRun._warm_up, [], []

    def loading(name):
        begun.append(name)
        return loaded

    def warming(self, given):
        if self.batch_size == 2:
            raise KeyboardInterrupt
        warm_up(self, given)

    monkeypatch.setattr(benching.BenchRun, "_warm_up", warming)
    how = {"trees": [TREE], "batch_sizes": [1, 2], "repeats": 1, "notify": print, "bar": common.bar}
    ways, keep = benching.ways_to_call(GREEDY), lambda found: kept.append(list(found))
    benching.bench_models(["a", "b", "c"], loading, PROMPTS[:1], ways, keep=keep, **how)
    assert begun == ["a"] and [one.stopped for one in kept[-1]] == ["interrupted"]


def test_without_copies_those_of_the_calibration_are_left_out(loaded, monkeypatch):
    model, tokenizer = loaded
    entry = {"tree": [[0]], "lookup": 3}
    monkeypatch.setattr(model.generation_config, "calibration", [entry], raising=False)
    asked = []
    monkeypatch.setattr(type(model), "generate", lambda self, **call: asked.append(call))
    for copied in (0, 4):
        methods = calls.decoding_methods(*loaded, acceptance={"prompt_lookup_num_tokens": copied})
        methods[calls.HEADS](calls.encode(model, tokenizer, ["a"]), GREEDY)
    assert asked[0]["calibration"] == [{"tree": [[0]], "lookup": 0}] and "prompt_lookup_num_tokens" not in asked[0]
    assert asked[1]["prompt_lookup_num_tokens"] == 4 and "calibration" not in asked[1] and entry["lookup"] == 3


def test_others_are_compared_in_the_same_run(loaded):
    notices = []
    alone, pairs = measured(loaded, compare=["prompt-lookup"], batch_sizes=[1, 2], notify=notices.append)
    assert alone.compared["prompt-lookup"]["identical"] and pairs.compared["prompt-lookup"] is None
    (notice,) = notices
    assert notice.startswith("prompt-lookup is left out: transformers decodes this way for")
    assert alone.speedup_over_compiled is None


@pytest.fixture
def compiled(loaded, monkeypatch):
    """Calls of the base with a static cache, which are made without one: how long their prompts are, and how they are
    compiled; `fails` says of a length with which words a call ends."""
    generate, seen = type(loaded[0].base).generate, types.SimpleNamespace(lengths=[], configs=[], fails=lambda _: None)

    def pretending(self, *arguments, **kwargs):
        if kwargs.pop("cache_implementation", None) == "static":
            seen.lengths.append(kwargs["input_ids"].shape[1])
            seen.configs.append(kwargs.pop("compile_config"))
            if (words := seen.fails(seen.lengths[-1])) is not None:
                raise RuntimeError(words)
        return generate(self, *arguments, **kwargs)

    monkeypatch.setattr(type(loaded[0].base), "generate", pretending)
    return seen


def test_the_compiled_base_is_compared_or_left_out_with_a_notice(loaded, compiled):
    (found,) = measured(loaded, compare=["compiled"])
    assert compiled.configs and all(config._compile_all_devices for config in compiled.configs)
    expected = found.tokens_per_second / found.compared["compiled"]["tokens_per_second"]
    assert found.speedup_over_compiled == pytest.approx(expected)
    compiled.fails = lambda length: "no compiler\nanywhere"
    (found,) = measured(loaded, compare=["compiled"])
    assert found.speedup_over_compiled is None and found.compared == {"compiled": None}
    assert found.notices == ["compiled is left out: no compiler anywhere."]


def test_every_new_shape_is_compiled_before_the_clock_runs(loaded, compiled):
    measured(loaded, compare=["compiled"], repeats=2)
    assert compiled.lengths == [6, *[5, 5, 5], *[1, 1, 1], *[1, 1], *[6, 6]]
    compiled.fails = lambda length: "no such shape" if length == 1 else None
    (found,) = measured(loaded, compare=["compiled"])
    assert found.notices == ["compiled is left out: no such shape."]
    assert found.compared["compiled"]["speedup"] > 0  # of the prompts before


def test_a_table_tells_measurements_apart(loaded):
    one, two = measured(loaded, batch_sizes=[1, 2], compare=["prompt-lookup"])
    other = dataclasses.replace(one, model="other", family="hydra")
    assert report.labels([one, two]) == ["medusa batch 1", "medusa batch 2"]
    assert report.labels([one, other]) == ["medusa", "hydra"]
    assert report.labels([one, dataclasses.replace(other, family="medusa")]) == ["medusa", "other"]
    typical = dataclasses.replace(one, acceptance={"acceptance": "typical"}, complete=False)
    columns = [column._cells for column in report.table([one, two, typical]).columns]
    assert columns[0] == [
        *("medusa batch 1", "  x", "  y", "  prompt-lookup"),
        *("medusa batch 2", "  x", "  y", "  prompt-lookup"),
        *("medusa batch 1 typical *", "  x", "  y", "  prompt-lookup"),
    ]
    assert columns[1][:4] == ["4", "3", "1", ""] and columns[6][7] == "-"  # for one prompt at a time only
    assert columns[4][0] == f"{one.tokens_per_step:.2f}"
    assert columns[7][3] == f"{one.compared['prompt-lookup']['speedup']:.2f}"
    assert report.to_json([one], questions="q")["questions"] == "q"
    assert [row["batch_size"] for row in report.to_json([one, two])["rows"]] == [1, 2]
