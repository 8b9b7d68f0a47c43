"""Remembers right: the drafter is given the base's own hidden states, in order, each with the token that follows it.

A wrong one costs speed and never correctness, so no comparison of texts would find it. The drafters of `agree` compare
every one of them with a plain forward of the base; here it is asserted that they were given what they asked for.
"""

import pytest
import torch

from hf_drafthead.bases.reader import BaseReader
from tests.bases import tiny_base
from tests.drafters import Drafted, half_right, right
from tests.families import FAMILIES, features_of
from tests.generation.agreement import TREE, agree, prompt, shared_base

CALLS = {
    "greedy": {"max_new_tokens": 22},
    "sampled": {"max_new_tokens": 22, "do_sample": True},
    "with processors": {"max_new_tokens": 22, "repetition_penalty": 1.1, "no_repeat_ngram_size": 2},
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@every_call
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("guess", [right, half_right], ids=["right", "half-right"])
def test_a_drafter_with_a_memory_sees_every_position_once(guess, rows, call):
    inputs = prompt(rows)
    found = agree(inputs=inputs, guess=guess, call=call, draft={"keeps_history": True})
    (state,) = found.oracle.states
    assert state.steps == found.steps + 1  # the prompt, then what every step committed
    for row, text in enumerate(found.oracle.texts):
        assert state.seen[row] == list(range(len(text) - 1))


@every_call
@pytest.mark.parametrize("rows", [1, 4])
def test_a_drafter_without_sees_the_last_position_of_the_prompt_and_all_behind_it(rows, call):
    inputs = prompt(rows)
    found = agree(inputs=inputs, call=call)
    (state,) = found.oracle.states
    assert state.steps == found.steps + 1
    for row, text in enumerate(found.oracle.texts):
        last = int(inputs["attention_mask"][row].sum()) - 1
        assert state.seen[row] == list(range(last, len(text) - 1))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_heads_of_every_family_are_given_the_base_s_hidden_states(family, monkeypatch):
    base = shared_base("llama")
    model = family.build(base)
    if not model.drafter.reads:
        pytest.skip("it reads no hidden states")
    inputs, given = prompt(2), []
    observe = model.drafter.observe

    def spy(state, features, tokens, lengths):
        given.append((features.clone(), tokens.clone(), lengths.clone()))
        return observe(state, features, tokens, lengths)

    monkeypatch.setattr(model.drafter, "observe", spy)
    sequences = model.generate(**inputs, max_new_tokens=14, draft_tree=TREE, eos_token_id=None)
    for row, padding in enumerate((9 - inputs["attention_mask"].sum(1)).tolist()):
        text = sequences[row, padding:].tolist()
        known, at = features_of(model, torch.tensor([text]))[0], -1
        for features, tokens, lengths in given:
            for hidden, token in zip(features[row, : lengths[row]], tokens[row, : lengths[row]].tolist()):
                distances = (known - hidden).abs().amax(-1)
                assert distances.min() < 1e-9
                at = at + 1 if model.drafter.keeps_history else int(distances.argmin())
                assert distances[at] < 1e-9 and text[at + 1] == token
        assert at >= len(text) - 2 - len(TREE)


def numbered_as(asked, total):
    """What transformers made of `output_hidden_states=asked` in a version: which hidden states it keeps."""
    return {
        "as it is installed": asked,
        "up to 5.17, which keeps all": bool(asked),
        "5.18 to 5.22, one layer late": asked if isinstance(asked, bool) else [(i + 1) % total for i in asked],
        "from 5.23 on": asked,
    }


@pytest.mark.parametrize("version", numbered_as(False, 1))
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_the_hidden_states_read_are_the_inputs_of_the_layers_whatever_a_version_makes_of_their_numbers(kind, version):
    """Compared with what hooks on the layers see, so that no numbering enters the expectation."""
    base = tiny_base(kind)
    decoder, given = base.get_decoder(), {}
    layers = getattr(decoder, "layers", None) or decoder.h
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(
            lambda module, args, kwargs, number=number: given.update(
                {number: args[0] if args else kwargs["hidden_states"]}
            ),
            with_kwargs=True,
        )
    forward = decoder.forward

    def of_version(*args, output_hidden_states=False, **kwargs):
        asked = numbered_as(output_hidden_states, len(layers) + 1)[version]
        return forward(*args, output_hidden_states=asked, **kwargs)

    decoder.forward = of_version
    with torch.no_grad():
        features = BaseReader.of_texts(base, (0, 1)).read_texts(prompt()["input_ids"]).features
    torch.testing.assert_close(features, torch.cat([given[0], given[1]], dim=-1), rtol=0, atol=0)


def test_a_drafter_is_told_how_many_positions_there_can_be(monkeypatch):
    monkeypatch.setattr("hf_drafthead.generation.entry.FIRST_ROOM", 4)
    found = agree(inputs=prompt(2), call={"max_new_tokens": 40}, draft={"keeps_history": True})
    assert found.oracle.states[0].capacity >= 9 + 40 - 1


def test_several_hidden_states_of_the_base_are_laid_side_by_side():
    base = shared_base("llama")
    heads = FAMILIES[0].build(base)
    given = []

    class Sees:
        reads = (0, 1, -1)
        max_depth = 4
        draft_tokens = None
        keeps_history = True
        copies = None
        training = False

        def prepare(self):
            pass

        def start(self, batch_size, capacity):
            return heads.drafter.start(batch_size, capacity)

        def observe(self, state, features, tokens, lengths):
            given.append(features[0, : lengths[0]])
            return heads.drafter.observe(state, features[..., -base.config.hidden_size :], tokens, lengths)

        def expand(self, state, tokens, parents):
            return heads.drafter.expand(state, tokens, parents)

    got = Drafted(base, Sees()).generate(**prompt(), max_new_tokens=12, draft_tree=TREE)
    assert torch.equal(got, base.generate(**prompt(), max_new_tokens=12))
    with torch.no_grad():
        layers = base(got[:, :-1], output_hidden_states=True).hidden_states
    expected = torch.cat([layers[layer] for layer in Sees.reads], dim=-1)[0]
    seen = torch.cat(given)
    torch.testing.assert_close(seen, expected[: len(seen)], rtol=0, atol=1e-9)
    assert len(seen) > 9
