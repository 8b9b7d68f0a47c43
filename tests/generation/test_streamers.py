"""Streamers get the tokens that the base's generate would give them, one position at a time, once they are sure."""

import threading

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

from tests.drafters import Drafted, Oracle, right
from tests.families import FAMILIES
from tests.generation.agreement import TREE, agree, own_lengths, prompt, shared_base
from tests.generation.test_stopping import OnToken, tokenizer  # noqa: F401


class Recorder(BaseStreamer):
    """Notes every call."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        assert value.device.type == "cpu"
        self.calls.append(value.tolist())

    def end(self):
        self.calls.append("end")


@pytest.mark.parametrize("eos", [None, [2, 51], "own"], ids=["all to the end", "some end before", "rows go on"])
@pytest.mark.parametrize("choice", [{}, {"do_sample": True}, {"repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("new_tokens", [1, 16])
def test_a_streamer_sees_the_calls_of_the_base(new_tokens, rows, choice, eos):
    made = []

    def call():
        made.append(Recorder())
        call = {"streamer": made[-1], "max_new_tokens": new_tokens, **choice}
        if eos != "own":
            return {**call, "eos_token_id": eos}
        return {**call, "eos_token_id": None, "stopping_criteria": StoppingCriteriaList([OnToken([2, 51])])}

    def own(sequences):
        return own_lengths(sequences, 9, [2, 51])

    found = agree(inputs=prompt(rows), call=call, new_tokens=own if eos == "own" else None)
    by_base, by_model = made
    assert by_model.calls == by_base.calls
    assert by_model.calls[0] == prompt(rows)["input_ids"].tolist() and by_model.calls[-1] == "end"
    assert by_model.calls[1:-1] == found.got.sequences[:, 9:].T.tolist()


class AfterPuts(StoppingCriteria):
    """Fires once its streamer was given so many positions, as a button does that follows what is shown."""

    def __init__(self, streamer, puts):
        self.streamer, self.puts = streamer, puts

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), len(self.streamer.calls) > self.puts)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("puts", [0, 1, 2, 6])
def test_a_criterion_that_looks_at_the_streamer_fires_where_it_fires_in_the_base(puts, rows):
    def call():
        streamer = Recorder()
        return {
            "streamer": streamer,
            "stopping_criteria": StoppingCriteriaList([AfterPuts(streamer, puts)]),
            "eos_token_id": None,
            "max_new_tokens": 12,
        }

    def own(sequences):
        return [sequences.shape[1] - 9] * rows

    found = agree(inputs=prompt(rows), guess=right, call=call, new_tokens=own)
    assert found.new_tokens == [max(puts, 1) + (puts > 0)] * rows


def test_a_streamer_of_a_prompt_in_embeddings():
    base, made = shared_base("llama-gqa"), []
    with torch.no_grad():
        embeddings = base.get_input_embeddings()(prompt()["input_ids"])

    def call():
        made.append(Recorder())
        return {"streamer": made[-1], "max_new_tokens": 8}

    agree(
        base,
        {"inputs_embeds": embeddings},
        call=call,
        texts=lambda s: [prompt()["input_ids"][0].tolist() + s[0].tolist()],
    )
    assert made[1].calls == made[0].calls


def test_tokens_are_streamed_as_soon_as_they_are_sure():
    base = shared_base("llama-gqa")
    text = base.generate(**prompt(), max_new_tokens=17, eos_token_id=None)[0].tolist()
    oracle, streamer, seen = Oracle(base, [text], right), Recorder(), []
    observe = oracle.observe

    def noted(*arguments):
        seen.append(len(streamer.calls) - 1)
        return observe(*arguments)

    oracle.observe = noted
    Drafted(base, oracle).generate(**prompt(), max_new_tokens=17, eos_token_id=None, draft_tree=TREE, streamer=streamer)
    # the drafter observes the prompt, then every step once its tokens were put
    assert seen == [1, 5, 9, 13, 17]


def test_text_streamer(tokenizer, capsys):  # noqa: F811
    base = shared_base("llama-gqa")
    model = FAMILIES[0].build(base)
    call = {**prompt(), "max_new_tokens": 20}
    base.generate(**call, streamer=TextStreamer(tokenizer, skip_prompt=True))
    expected = capsys.readouterr().out
    model.generate(**call, streamer=TextStreamer(tokenizer, skip_prompt=True), draft_tree=TREE)
    assert capsys.readouterr().out == expected and len(expected) > 10
    with pytest.raises(ValueError, match="TextStreamer only supports batch size 1"):
        model.generate(**prompt(2), max_new_tokens=5, streamer=TextStreamer(tokenizer), draft_tree=TREE)


def test_text_iterator_streamer(tokenizer):  # noqa: F811
    base = shared_base("llama-gqa")
    model = FAMILIES[0].build(base)
    call = {**prompt(), "max_new_tokens": 20}
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=model.generate, kwargs={**call, "streamer": streamer, "draft_tree": TREE})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == tokenizer.decode(base.generate(**call)[0, 9:])
