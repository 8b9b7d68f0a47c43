"""What the page shows without a browser: both sides write what `generate` writes, and bad input is one line."""

from concurrent.futures import ThreadPoolExecutor as Pool
from types import SimpleNamespace

import pytest
import torch

gradio = pytest.importorskip("gradio", reason="gradio is not installed: pip install 'hf-drafthead[page]'")

from hf_drafthead.evaluation.calls import BASE, HEADS  # noqa: E402
from hf_drafthead.page import app  # noqa: E402

PROMPT = "def read_json(path):\n"
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
TEMPLATE = "{{ bos_token }}{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}"


def shown(hydra, prompt=PROMPT, **changes) -> dict:
    """What is on the page at the end."""
    outputs: dict = {}
    for some in app.shown(*hydra, prompt, **{"tree": str(TREE), "max_new_tokens": 32, **changes}):
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


@pytest.mark.parametrize("changes", [{}, {"temperature": 1.0, "seed": 3}, {"copies": 4}, {"tree": app.OWN_TREE}])
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
    how = {"max_new_tokens": 32, "do_sample": False, "draft_tree": TREE, "return_dict_in_generate": True}
    lengths = model.generate(inputs["input_ids"], **how).accepted_lengths
    heads, base = shown(hydra)["figures"]
    assert heads[:2] == ["heads", "32"] and base[:2] == ["base", "32"]
    assert heads[4:] == [str(lengths.shape[1]), f"{lengths.float().mean().item():.2f}"] and base[4:] == ["31", "-"]


def test_a_question_is_asked_in_the_chat_template(hydra, monkeypatch):
    monkeypatch.setattr(hydra[1], "chat_template", TEMPLATE)
    assert text(shown(hydra, "x = 1", chat=True)[HEADS]) == by_generate(hydra, "# user\nx = 1\n")


@pytest.mark.parametrize("near_tie", [True, False])
def test_rounding_is_told_from_a_fault(near_tie):
    call = SimpleNamespace(first_difference=lambda *given: SimpleNamespace(position=7, near_tie=near_tie))
    words = app.verdict(call, *(SimpleNamespace(steps=3, seconds=1.0, tokens=[token]) for token in (1, 2)))
    assert ("where rounding decides a near tie" in words) == near_tie and ("**different texts**" in words) != near_tie


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"prompt": " \n"}, "the prompt is empty: write the text that the model shall continue."),
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


def test_whoever_reads_no_further_ends_the_thread(hydra, monkeypatch):
    threads = []
    monkeypatch.setattr(app, "ThreadPoolExecutor", lambda count: threads.append(pool := Pool(count)) or pool)
    running = app.streamed(*hydra, PROMPT, max_new_tokens=400)
    next(running)
    (thread,) = threads[0]._threads
    assert thread.is_alive()
    running.close()
    assert not thread.is_alive()


@pytest.mark.parametrize("path, name", [("org/heads", "heads"), ("a/b/heads/", "heads"), (".", None)])
def test_the_page_is_named_for_its_model(monkeypatch, tmp_path, path, name):
    monkeypatch.chdir(tmp_path)
    assert app.name_of(SimpleNamespace(name_or_path=path)) == (name or tmp_path.name)
