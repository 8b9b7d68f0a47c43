"""The stopwatch asks as `bench` asks, and says where the two disagree."""

import json

import pytest

from hf_drafthead.evaluation.loading import load
from hf_drafthead.evaluation.questions import Question
from tests.checkpoints import save_base, save_heads
from tests.tools import stopwatch
from tests.tools.stopwatch import Tally, by_bench, by_hand, disagreements

CHAT = Question(("ab", "cd"), chat=True)
TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_heads(folder, save_base(folder), "medusa")
    rows = [{"turns": ["ab", "cd"]}, {"prompt": "ef"}]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "chat.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize("question", [CHAT, Question(("def",))], ids=["chat", "text"])
def test_every_turn_is_asked_as_bench_asks_it(folder, monkeypatch, question):
    model, tokenizer = load(str(folder / "medusa"))
    tokenizer.chat_template = TEMPLATE
    generate, asked = type(model.base).generate, []

    def listening(self, *arguments, **kwargs):
        if "custom_generate" not in kwargs and kwargs["input_ids"].tolist() not in asked:
            asked.append(kwargs["input_ids"].tolist())
        return generate(self, *arguments, **kwargs)

    monkeypatch.setattr(type(model.base), "generate", listening)
    settings = {"do_sample": False, "max_new_tokens": 6}
    by_hand_asked, tallies = [], (Tally(), Tally())
    by_hand(model, tokenizer, question, settings, 1, tallies[0])
    by_hand_asked, asked = asked, []
    by_bench(model, tokenizer, question, settings, 1, tallies[1])
    assert by_hand_asked == asked and len(asked) == len(question.turns)
    loop, benched = tallies
    assert (loop.emitted, loop.steps, loop.tokens) == (benched.emitted, benched.steps, benched.tokens)
    assert loop.tokens_per_step >= 1


def tally(base=2.0, heads=1.0, emitted=30, steps=10):
    return Tally({"base": base, "heads": heads}, emitted, steps)


@pytest.mark.parametrize(
    "benched, found",
    [
        (tally(base=2.09), []),
        (tally(base=1.91), []),
        (tally(base=2.11), ["the speedups are more than 5% apart."]),
        (tally(base=1.89), ["the speedups are more than 5% apart."]),
        (tally(steps=11), ["the tokens per step are not those of the loop."]),
        (tally(emitted=31), ["the tokens per step are not those of the loop."]),
    ],
)
def test_what_lies_apart_is_a_disagreement(benched, found):
    assert disagreements(tally(), benched) == found


@pytest.mark.parametrize("more, code", [(1.0, 0), (1.2, 1)])
def test_a_disagreement_ends_with_1(folder, monkeypatch, capsys, more, code):
    def known(model, tokenizer, question, settings, repeats, told, factor=1.0):
        told.seconds = {"base": told.seconds["base"] + 2.0 * factor, "heads": told.seconds["heads"] + 1.0}
        told.emitted, told.steps = told.emitted + 3, told.steps + 1

    monkeypatch.setattr(stopwatch, "by_hand", known)
    monkeypatch.setattr(stopwatch, "by_bench", lambda *arguments: known(*arguments, factor=more))
    template = ["--chat-template", str(folder / "chat.jinja")]
    with pytest.raises(SystemExit) as end:
        stopwatch.main([str(folder / "medusa"), str(folder / "questions.jsonl"), "--max-new-tokens", "6", *template])
    assert end.value.code == code
    printed = capsys.readouterr()
    assert f"speedup: loop 2.000, bench {2 * more:.3f}, ratio {more:.3f}" in printed.out
    assert ("more than 5% apart" in printed.err) == bool(code)
