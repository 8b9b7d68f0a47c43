"""The page's HTML: nothing that a model writes becomes markup, depths have their colours, the tree shows the walk."""

import re
from types import SimpleNamespace
from xml.etree import ElementTree

from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.page import drawing
from hf_drafthead.page.comparison import BASE, HEADS, Side, WalkedStep
from tests.checkpoints import byte_tokenizer

TOKENIZER = byte_tokenizer()
TREE = DraftTree([(0,), (1,), (0, 0), (0, 1)])


def ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def heads(text: str, lengths: list[int]) -> Side:
    """A side that wrote `text`, its first token from the prompt, then steps of these lengths."""
    side, at = Side(HEADS, ids(text), seconds=2.0, drafted=True, finished=True), 1
    for length in lengths:
        emitted = tuple(side.tokens[at : at + length])
        side.steps.append(WalkedStep(side.tokens[at - 1], emitted, (0, 1, 4)[:length]))
        at += length
    return side


def test_each_accepted_guess_has_the_colour_of_its_depth():
    drawn = drawing.text(TOKENIZER, heads("abcdef", [3, 2]))
    assert re.findall(r'class="dh-(\d)"[^>]*>(.)<', drawn) == [("1", "b"), ("2", "c"), ("1", "e")]
    assert re.sub("<[^>]*>", "", drawn) == "abcdef"


def test_a_copy_has_a_colour_of_its_own():
    side = heads("abcdef", [3, 2])
    side.steps = [WalkedStep(step.root, step.emitted, step.walked, copied) for step, copied in zip(side.steps, (1, 0))]
    drawn = drawing.text(TOKENIZER, side)
    assert re.findall(r'class="dh-(copy|\d)"[^>]*>(.)<', drawn) == [("copy", "b"), ("2", "c"), ("1", "e")]
    assert ".dh-copy " in drawing.CSS and "dh-copy" in drawing.depth_legend(2)
    assert [drawing.shade(depth) for depth in (1, 6, 7)] == [1, 6, 1]  # colours begin again behind the last
    assert all(f".dh-{shade} " in drawing.CSS for shade in range(1, 7))


def test_what_is_written_is_never_markup():
    side = heads("<b>&'\"", [3, 2])
    for drawn in (
        drawing.text(TOKENIZER, side, drawing.prompt("<script>")),
        drawing.text(TOKENIZER, side, drawing.conversation([{"role": "user", "content": "<i>"}])),
        drawing.tree(TOKENIZER, TREE, side.steps, 0),
    ):
        ElementTree.fromstring(drawn)
        assert not {"<b>", "<script>", "<i>"} & set(re.findall(r"<\w+>", drawn))


def test_an_unfinished_character_is_held_back_until_the_end():
    side = heads("aé", [2])
    side.tokens, side.finished = side.tokens[:2], False
    assert re.sub("<[^>]*>", "", drawing.text(TOKENIZER, side)) == "a"


def test_figures_are_those_of_the_side():
    def cells(side):
        return {name: value for value, name in re.findall(r"<b>(.*?)</b><br>(.*?)<", drawing.figures_row(side))}

    expected = {"tokens": "6", "seconds": "2.00", "tokens per second": "3.0", "forward passes": "2"}
    assert cells(heads("abcdef", [3, 2])) == {**expected, "tokens per step": "2.50"}
    base = Side(BASE, ids("abcdef"), seconds=3.0)
    assert cells(base)["forward passes"] == "5" and cells(base)["tokens per step"] == "1.00"
    assert cells(Side(BASE))["tokens per second"] == "–"


def test_the_tree_shows_tokens_on_the_walk_and_ranks_elsewhere():
    drawn = drawing.tree(TOKENIZER, TREE, heads("abcdef", [3, 2]).steps, 0)
    labels = re.findall(r'<g class="(\w+)">.*?<text[^>]*>(.*?)</text>', drawn)
    assert labels == [("walked", "a"), ("walked", "b"), ("idle", "2"), ("idle", "1"), ("walked", "c")]
    paths = ElementTree.fromstring(drawn).iter("path")
    assert [line.get("stroke") for line in paths if line.get("class") == "walked"] == [*drawing.DEPTH_COLOURS[:2]]


def test_lines_are_thicker_where_more_steps_went():
    drawn = drawing.tree(TOKENIZER, TREE, heads("abcdef", [3, 2]).steps, 1)
    widths = [float(line.get("stroke-width")) for line in ElementTree.fromstring(drawn).iter("path")]
    assert widths == [5.8, 0.8, 0.8, 3.3]  # walked in 2, 0, 0 and 1 of 2 steps
    assert "accepted in 1 of 2 steps" in drawn


def test_a_step_is_told_in_a_sentence():
    steps = heads("abcdef", [3, 1]).steps
    first, second = (drawing.step_in_words(TREE, steps, shown) for shown in (0, 1))
    assert first == "Step 1 of 2: 4 guesses, 2 accepted, 3 tokens from one forward pass."
    assert second == "Step 2 of 2: 4 guesses, 0 accepted, 1 token from one forward pass."


def test_white_space_can_be_seen():
    assert [drawing.visible(TOKENIZER, ids(blank)[0]) for blank in " \n\t"] == ["␣", "⏎", "⇥"]
    tokenizer = SimpleNamespace(decode=lambda tokens, **_: "a" * tokens[0])
    assert [drawing.visible(tokenizer, length) for length in (0, 16, 17)] == ["∅", "a" * 16, "a" * 15 + "…"]
