"""Tokens that a constraint leaves no choice of: guessed as a path, asked for once, and the text is the base's."""

import functools
import json
import os

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

import hf_drafthead
from hf_drafthead import zoo
from hf_drafthead.bases.releases import BaseStreamer
from hf_drafthead.generation.grammar import AskedOnce
from hf_drafthead.serving.served import TokenScores
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES
from tests.generation import test_recorded
from tests.generation.agreement import shared_base

recordings = test_recorded.recordings  # where there are graphs
PROMPT = torch.tensor([[5, 6, 7, 8]])


class Frames:
    """A token is free at every fifth place, and the four behind it are told by it; notes what it was asked."""

    def __init__(self, free=5):
        self.free, self.asked, self.state = free, [], 0

    def __call__(self, row, prefix):
        tokens = prefix.tolist()
        self.asked.append((row, tokens))
        self.state += 1
        if len(tokens) % self.free == 0:
            return [*range(3, VOCABULARY)]
        return [(tokens[-1] * 7 + len(tokens)) % (VOCABULARY - 3) + 3]


class WithState(Frames):
    """One whose answers depend on how often it was asked."""

    def __call__(self, row, prefix):
        super().__call__(row, prefix)
        return [*range(3, VOCABULARY)] if self.state % 4 == 0 else [self.state * 5 % (VOCABULARY - 3) + 3]


MODELS = {"copies": lambda base: hf_drafthead.from_base(base), **{family.name: family.build for family in FAMILIES[:4]}}
TREES = {"static": [[0], [1], [0, 0]], "dynamic": {"dynamic": {"nodes": 4, "depth": 2, "width": 2}}, "lookup": None}


def both(model, function=Frames, prompt=PROMPT, **call):
    """The same call of the model and of its base: the same text, and the function was asked the same."""
    call = {"input_ids": prompt, "max_new_tokens": 28, "eos_token_id": None, "pad_token_id": 0, **call}
    how = {
        name: call.pop(name) for name in ("draft_tree", "prompt_lookup_num_tokens", "disable_compile") if name in call
    }
    functions = [function(), function()]
    torch.manual_seed(3)
    expected = model.base.generate(**call, prefix_allowed_tokens_fn=functions[0])
    state = torch.get_rng_state()
    torch.manual_seed(3)
    found = model.generate(**call, **how, prefix_allowed_tokens_fn=functions[1], return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected) and torch.equal(torch.get_rng_state(), state)
    assert functions[0].asked == functions[1].asked
    return found.accepted_lengths


@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "top_k": 9, "temperature": 0.7}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(8)
def test_certain_tokens_take_no_steps_and_the_text_is_the_base_s(name, tree, sampling):
    how = {} if (name == "copies") else {"draft_tree": TREES[tree] or "lookup"}
    how |= {"prompt_lookup_num_tokens": 4} if tree == "lookup" else {}
    steps = both(MODELS[name](shared_base("llama-gqa")), **how, **sampling)
    assert steps.shape[1] <= 7  # 27 tokens behind the first, five in each step but the last ones


@pytest.mark.few(8)
@pytest.mark.parametrize("ends", [None, [9, 11, 13]])
@pytest.mark.parametrize("function", [Frames, WithState])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_function_with_a_state_is_asked_as_the_base_asks_it(rows, function, ends):
    prompt = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6], [4, 4, 4, 4]])[:rows]
    model = FAMILIES[0].build(shared_base("llama-gqa"))
    steps = both(model, function, prompt, eos_token_id=ends, draft_tree=[[0], [1]])
    assert ends or rows > 1 or (steps.sum() + 1) / steps.shape[1] > 2


class Mixed(Frames):
    """Often one token alone, told by the prefix, or by how often it was asked."""

    def __init__(self, seed, with_state):
        super().__init__()
        self.seed, self.with_state = seed, with_state

    def __call__(self, row, prefix):
        super().__call__(row, prefix)
        dice = (sum(prefix.tolist()[-3:]) * 31 + len(prefix) * 7 + self.seed + self.state * self.with_state) % 11
        return [*range(3 + dice, VOCABULARY - dice)] if dice < 4 else [dice * 5 + 4]


model_of = functools.cache(lambda name: MODELS[name](shared_base("llama-gqa")))


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@settings(max_examples=int(os.environ.get("FUZZ_EXAMPLES", "25")), derandomize=True, deadline=None, database=None)
@given(
    name=st.sampled_from([*MODELS]),
    tree=st.sampled_from([*TREES.values(), [[0]], [[0], [0, 0], [0, 0, 0]]]),
    copies=st.none() | st.integers(1, 9),
    prompts=st.integers(1, 3).flatmap(
        lambda rows: st.lists(st.tuples(*[st.integers(3, 9)] * 5), min_size=rows, max_size=rows)
    ),
    seed=st.integers(0, 99),
    with_state=st.booleans(),
    ends=st.none() | st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=4, unique=True),
    tokens=st.sampled_from([24, 40, 33, 9, 1]),
    sampling=st.sampled_from(
        [{}, {}, {"do_sample": True, "top_k": 5}, {"repetition_penalty": 1.2}, {"min_new_tokens": 9}]
    ),
)
def test_whatever_is_certain_the_text_is_the_base_s(
    name, tree, copies, prompts, seed, with_state, ends, tokens, sampling
):
    how = {} if name == "copies" else {"draft_tree": tree or [[0], [1]]}
    how |= {} if copies is None else {"prompt_lookup_num_tokens": copies}
    call = {"max_new_tokens": tokens, "eos_token_id": ends, **sampling}
    both(model_of(name), lambda: Mixed(seed, with_state), torch.tensor(prompts), **how, **call)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3.5", "granite-hybrid"])
def test_on_bases_of_other_kinds(kind):
    fields = {} if kind == "gpt2" else {"dtype": torch.float32, "attn_implementation": None}
    assert both(hf_drafthead.from_base(tiny_base(kind, **fields))).shape[1] <= 7


@pytest.mark.parametrize("tree", ["static", "lookup"])
def test_recorded_steps_have_such_paths_too(tree, recordings):
    how = {"draft_tree": TREES[tree] or "lookup", "prompt_lookup_num_tokens": 4} if tree == "lookup" else {}
    how = how or {"draft_tree": TREES[tree]}
    assert both(FAMILIES[0].build(tiny_base("llama-gqa")), **how).shape[1] <= 7 and recordings


class Forbids(LogitsProcessor):
    """Another object of the user's, which forbids what the constraint allows."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 20:30] = -torch.inf
        return scores


@pytest.mark.parametrize(
    "more",
    [
        {"logits_processor": LogitsProcessorList([Forbids()])},
        {"suppress_tokens": [*range(20, 30)]},
        {"no_repeat_ngram_size": 2},
        {"stopping_criteria": StoppingCriteriaList([lambda ids, scores: torch.tensor([ids.shape[1] > 11] * len(ids))])},
        {"repetition_penalty": 1.4},
        {"max_new_tokens": 1},
        {"num_beams": 2},
    ],
    ids=lambda more: next(iter(more)),
)
def test_with_others_that_choose_or_end_it_is_asked_as_by_the_base(more):
    model = FAMILIES[0].build(shared_base("llama-gqa"))
    if "num_beams" in more:
        call = {"input_ids": PROMPT, "max_new_tokens": 9, "eos_token_id": None, **more}
        texts = [each.generate(**call, prefix_allowed_tokens_fn=Frames()) for each in (model, model.base)]
        assert torch.equal(*texts)
        return
    both(model, WithState, draft_tree=[[0], [1]], **more)


class Draws(Frames):
    """One that draws at a single place, between what the base draws."""

    def __call__(self, row, prefix):
        said = super().__call__(row, prefix)
        return [int(torch.randint(3, VOCABULARY, ()))] if len(prefix) == 13 else said


class Reuses(Frames):
    """One that fills the same list again and again."""

    said: list = []

    def __call__(self, row, prefix):
        self.said[:] = super().__call__(row, prefix)
        return self.said


class Arrays(Frames):
    def __call__(self, row, prefix):
        return numpy.array(super().__call__(row, prefix))


@pytest.mark.parametrize("more", [{}, {"do_sample": True}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("function", [Draws, Reuses, Arrays, WithState])
@pytest.mark.few(12)
def test_whatever_it_gives_and_draws(function, more):
    both(FAMILIES[0].build(shared_base("llama-gqa")), function, draft_tree=[[0], [1]], **more)


def test_where_a_streamer_tells_it_what_was_written_nothing_is_asked_ahead():
    class Told(BaseStreamer):
        def __init__(self, function):
            self.put, self.end = lambda tokens: setattr(function, "free", 5 + function.state // 9), lambda: None

    model, texts = FAMILIES[0].build(shared_base("llama-gqa")), []
    for each in (model.base, model):
        call = {"prefix_allowed_tokens_fn": (function := Frames()), "streamer": Told(function), "eos_token_id": None}
        texts.append((each.generate(PROMPT, max_new_tokens=28, **call).tolist(), function.asked))
    assert texts[0] == texts[1]


class Raises(Frames):
    def __call__(self, row, prefix):
        if len(prefix) == 13:
            raise KeyError("the thirteenth")
        return super().__call__(row, prefix)


class Beyond(Frames):
    def __call__(self, row, prefix):
        return [VOCABULARY + 7] if len(prefix) == 13 else super().__call__(row, prefix)


class Refused(Frames):
    def __call__(self, row, prefix):
        return [] if super().__call__(row, prefix) and len(prefix) == 13 else [5]


class Words(Frames):
    def __call__(self, row, prefix):
        return torch.tensor([5.0]) if super().__call__(row, prefix) and len(prefix) == 13 else [5]


FAULTS = [(Raises, "the thirteenth"), (Refused, "empty list"), (Beyond, "out of bounds"), (Words, "as indices must be")]


@pytest.mark.parametrize("kind, line", FAULTS)
@pytest.mark.few(4)
def test_what_it_raises_ends_the_call_where_the_base_s_would_end(kind, line):
    model, asked = FAMILIES[0].build(shared_base("llama-gqa")), []
    for each in (model.base, model):
        function = kind()
        with pytest.raises((KeyError, ValueError, IndexError), match=line):
            each.generate(PROMPT.repeat(3, 1), max_new_tokens=20, eos_token_id=None, prefix_allowed_tokens_fn=function)
        asked.append(function.asked)
    assert asked[0] == asked[1]


@pytest.mark.parametrize("slots, texts", [(2, None), (3, [[5, 6, 7, 8]])], ids=["by turns", "copies go on behind them"])
def test_many_requests_have_such_paths(slots, texts):
    base = shared_base("llama-gqa")
    model, call = FAMILIES[0].build(base), {"max_new_tokens": 20, "eos_token_id": None}
    prompts = [PROMPT[0].tolist(), [9, 8, 7, 6, 5], [4, 4]]
    manager = model.init_continuous_batching(slots=slots, lookup_texts=texts)
    functions = [Frames(), Frames(), None]
    how = [{"prefix_allowed_tokens_fn": each} if each else {"max_new_tokens": 60} for each in functions]
    names = [manager.add_request(prompt, **{**call, **each}) for prompt, each in zip(prompts, how)]
    manager.start()
    outputs = [manager.get_result(name) for name in names]
    manager.stop()
    for prompt, function, output in zip(prompts, functions, outputs):
        again = Frames() if function else None
        settings = {**call, "max_new_tokens": len(output.generated_tokens)}
        expected = base.generate(torch.tensor([prompt]), **settings, prefix_allowed_tokens_fn=again)
        assert output.error is None and output.generated_tokens == expected[0, len(prompt) :].tolist()
        assert function is None or (function.asked == again.asked and output.accepted >= 12)


def test_a_token_that_the_base_does_not_have_ends_its_request_alone():
    base = shared_base("llama-gqa")
    model, call = FAMILIES[0].build(base), {"max_new_tokens": 20, "eos_token_id": None}
    manager = model.init_continuous_batching(slots=2)
    names = [manager.add_request([5, 6, 7, 8], **call, prefix_allowed_tokens_fn=each) for each in (Beyond(), Frames())]
    manager.start()
    first, second = (manager.get_result(name) for name in names)
    manager.stop()
    assert first.error.startswith(f"IndexError: index {VOCABULARY + 7} is out of bounds") and second.error is None
    assert second.generated_tokens == base.generate(PROMPT, **call, prefix_allowed_tokens_fn=Frames())[0, 4:].tolist()


def test_what_was_asked_ahead_is_not_taken_for_another_prefix():
    function = Frames()
    once = AskedOnce(function)
    assert [once.ahead(0, torch.tensor([4, 5]), VOCABULARY) for _ in range(2)] == [40, 40] and len(function.asked) == 1
    once(0, torch.tensor([4, 6]))
    assert [tokens for _, tokens in function.asked] == [[4, 5], [4, 6]]


def test_a_grammar_of_a_server_tells_its_path():
    llguidance, readers = pytest.importorskip("llguidance"), pytest.importorskip("llguidance.hf")
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("base"))
    model = AutoModelForCausalLM.from_pretrained(zoo.path("medusa")).double()
    ids = tokenizer("settings = ", return_tensors="pt")["input_ids"]
    properties = {f"property_{number}": {"type": "boolean"} for number in range(6)}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    reader, texts = readers.from_tokenizer(tokenizer, n_vocab=1024, eos_token=[1]), []
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_flexible": False}
    )
    for each in (model.base, model):
        processor = TokenScores(ids.shape[1], (0.0, 0.0), None, llguidance.LLMatcher(reader, grammar))
        call = {"input_ids": ids, "max_new_tokens": 120, "logits_processor": [processor]}
        texts.append(each.generate(**call, return_dict_in_generate=True))
    assert torch.equal(texts[0].sequences, texts[1].sequences)
    assert tokenizer.decode(texts[1].sequences[0]).count("property_") == 6
    steps = texts[1].accepted_lengths
    assert steps.sum() / steps.shape[1] > 4
