"""What the page shows without a browser: both sides write what `generate` writes, and bad input is one line."""

import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch

gradio = pytest.importorskip("gradio", reason="gradio is not installed: pip install 'hf-drafthead[page]'")

from hf_drafthead.evaluation.calls import BASE, HEADS  # noqa: E402
from hf_drafthead.page import app  # noqa: E402
from hf_drafthead.page.app import OWN_TREE, Asked, Page, Stopped, name_of, streamed  # noqa: E402

PROMPT = "def read_json(path):\n"
HOW = {"tree": "[[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]", "temperature": 0.0, "max_new_tokens": 32}
ASKED = Asked(written=PROMPT, chat=False, messages=[], copies=0, seed=0, **HOW)
TEMPLATE = "{{ bos_token }}{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}"


def shown(hydra, **changes) -> dict:
    """What is on the page at the end."""
    outputs: dict = {}
    for some in Page(*hydra).generate(dataclasses.replace(ASKED, **changes), "visitor"):
        outputs |= some
    return outputs


def text(pieces) -> str:
    return "".join(piece for piece, _ in pieces)


def by_generate(hydra, prompt, **settings) -> str:
    model, tokenizer = hydra
    inputs = tokenizer(prompt, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    output = model.base.generate(**inputs, **{"max_new_tokens": 32, "do_sample": False, **settings})
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("changes", [{}, {"temperature": 1.0, "seed": 3}, {"copies": 4}, {"tree": OWN_TREE}])
def test_both_sides_write_the_text_of_the_base(hydra, changes):
    found = shown(hydra, **changes)
    torch.manual_seed(3)
    sampled = {"do_sample": True, "temperature": 1.0} if "temperature" in changes else {}
    assert text(found[HEADS]) == text(found[BASE]) == PROMPT + by_generate(hydra, PROMPT, **sampled)
    names = {name for _, name in found[HEADS]} - {None}
    assert names & {"depth 1", "copied"} and ("copied" in names) == ("copies" in changes)
    assert {name for _, name in found[BASE]} == {None}
    assert found["verdict"].startswith("Speedup **") and found["verdict"].endswith("wrote the same text.")


def test_the_figures_are_those_of_generate(hydra):
    model, tokenizer = hydra
    inputs = tokenizer(PROMPT, return_tensors="pt")
    tree = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
    how = {"max_new_tokens": 32, "do_sample": False, "draft_tree": tree, "return_dict_in_generate": True}
    lengths = model.generate(inputs["input_ids"], **how).accepted_lengths
    heads, base = shown(hydra)["figures"]
    assert heads[:2] == ["heads", "32"] and base[:2] == ["base", "32"]
    assert heads[4:] == [str(lengths.shape[1]), f"{lengths.float().mean().item():.2f}"] and base[4:] == ["31", "-"]


def test_a_chat_goes_on_with_its_own_answers(hydra, monkeypatch):
    monkeypatch.setattr(hydra[1], "chat_template", TEMPLATE)
    first = shown(hydra, chat=True, written="x = 1")
    answer = by_generate(hydra, "# user\nx = 1\n")
    assert text(first[HEADS]) == answer and first["written"] == ""
    said = [{"role": "user", "content": "x = 1"}, {"role": "assistant", "content": answer}]
    assert first["messages"] == first["chat"] == said
    second = shown(hydra, chat=True, written="y = 2", messages=said)
    assert text(second[HEADS]) == by_generate(hydra, f"# user\nx = 1\n# assistant\n{answer}\n# user\ny = 2\n")


@pytest.mark.parametrize("near_tie", [True, False])
def test_rounding_is_told_from_a_fault(hydra, monkeypatch, near_tie):
    parted = SimpleNamespace(position=7, near_tie=near_tie)
    monkeypatch.setattr(app.BaseCall, "first_difference", lambda *given: parted)
    ours, theirs = (SimpleNamespace(steps=3, seconds=1.0, tokens=[token]) for token in (1, 2))
    words = ASKED.verdict(*hydra, {HEADS: ours, BASE: theirs})
    assert ("where rounding decides a near tie" in words) == near_tie and ("**different texts**" in words) != near_tie


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"written": " \n"}, "the prompt is empty: write the text that the model shall continue."),
        ({"tree": "[[0], [0,"}, "the tree '[[0], [0,' is not JSON"),
        ({"tree": "[[0, 0]]"}, "node (0, 0) has no parent"),
        ({"tree": "nonesuch"}, "draft_tree 'nonesuch' is no published tree"),
        ({"max_new_tokens": 100_000}, "a prompt of "),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(hydra, changes, line):
    with pytest.raises(gradio.Error) as refused:
        shown(hydra, **changes)
    assert refused.value.message.startswith(line) and "\n" not in refused.value.message


def test_a_stop_and_leaving_early_end_the_thread(hydra):
    stop, write = threading.Event(), dataclasses.replace(ASKED, max_new_tokens=400).writers(*hydra)[HEADS]
    running = streamed(write, stop)
    next(running)
    stop.set()
    with pytest.raises(Stopped):
        list(running)
    running = streamed(write, stop := threading.Event())
    next(running)
    running.close()
    assert stop.is_set() and "streamed" not in str(threading.enumerate())


@pytest.mark.parametrize("path, name", [("org/heads", "heads"), ("a/b/heads/", "heads"), (".", None)])
def test_the_page_is_named_for_its_model(monkeypatch, tmp_path, path, name):
    monkeypatch.chdir(tmp_path)
    assert name_of(SimpleNamespace(name_or_path=path)) == (name or tmp_path.name)
