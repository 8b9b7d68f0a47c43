"""What the page shows, as HTML: text coloured by depth, a line of figures, and the tree of one step as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from hf_drafthead.cards.pictures import rows_of_nodes
from hf_drafthead.evaluation.conversation import Spelling
from hf_drafthead.evaluation.measurement import COPIED
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.page.comparison import Side, WalkedStep

# of depths 1, 2 ...; then from the start
DEPTH_COLOURS = ("#2e9e4f", "#1496a8", "#3b6fd4", "#9b51c9", "#d0455c", "#c98a12")
COLUMN, ROW, MARGIN = 190, 17, 14  # pixels of the tree's picture: a depth, a leaf, the edge
LONGEST_LABEL = 16  # characters of a token in the tree
VISIBLE = str.maketrans("\n\t ", "⏎⇥␣")

CSS = (resources.files("hf_drafthead.page") / "page.css").read_text(encoding="utf-8") + "".join(
    f".dh-{depth} {{ background: {colour}55; }}\n" for depth, colour in enumerate(DEPTH_COLOURS, start=1)
)


def shade(depth: int) -> int:
    """Which of the colours, counted from 1, stands for a depth of at least 1."""
    return (depth - 1) % len(DEPTH_COLOURS) + 1


def text(tokenizer: Any, side: Side, before: str = "") -> str:
    """What a side has written, below the HTML of what came before, each accepted guess in the colour of its depth or in
    that of copies."""
    spelling = Spelling(tokenizer)
    tokens = list(side.tokens)
    pieces = [(spelling.add(token), depth) for token, depth in zip(tokens, side.depths)]
    if side.finished:
        pieces.append((spelling.rest(), 0))
    written = "".join(_coloured(escape(piece), depth) for piece, depth in pieces if piece)
    return f'<div class="dh-text">{before}{written}</div>'


def _coloured(piece: str, depth: int) -> str:
    """A piece of HTML in the colour of its depth; the base's own tokens have none."""
    if depth == COPIED:
        return f'<span class="dh-copy" title="copied from the text">{piece}</span>'
    return f'<span class="dh-{shade(depth)}" title="guess at depth {depth}">{piece}</span>' if depth else piece


def prompt(written: str) -> str:
    """A text that is continued, set apart from what continues it."""
    return f'<span class="turn prompt">{escape(written)}</span>'


def conversation(messages: Sequence[dict[str, str]]) -> str:
    return "".join(f'<div class="turn {message["role"]}">{escape(message["content"])}</div>' for message in messages)


def figures_row(side: Side) -> str:
    """How much a side has written, how fast, and in how many forwards."""
    forwards = len(side.steps) if side.drafted else max(len(side.tokens) - 1, 0)  # after the prompt's own
    cells = {
        "tokens": str(len(side.tokens)),
        "seconds": f"{side.seconds:.2f}",
        "tokens per second": _digits(side.tokens_per_second, 1),
        "forward passes": str(forwards),
        "tokens per step": _digits(side.tokens_per_step, 2),
    }
    row = "".join(f"<td><b>{value}</b><br>{name}</td>" for name, value in cells.items())
    return f'<table class="dh-figures"><tr>{row}</tr></table>'


def depth_legend(deepest: int) -> str:
    colours = "".join(f'<span class="dh-{shade(depth)}">depth {depth}</span>' for depth in range(1, deepest + 1))
    colours += '<span class="dh-copy">copied from the text</span>'
    return f'<div class="dh-legend">Accepted guesses: {colours} no colour: chosen by the base itself</div>'


def tree(tokenizer: Any, topology: DraftTree, steps: Sequence[WalkedStep], shown: int) -> str:
    """The tree as one step walked it: the tokens of the accepted path, and the rank of every other guess.

    Lines are thicker the more often a node was walked in all the steps so far; `shown` is one of these, from 0.
    """
    visits = [0] * topology.num_nodes
    for step in steps:
        for node in step.walked:
            visits[node] += 1
    tokens = steps[shown].tokens
    heights = rows_of_nodes(topology)
    places = [(MARGIN + depth * COLUMN, MARGIN + height * ROW) for depth, height in zip(topology.depths, heights)]
    lines, labels = [], []
    for node, (x, y) in enumerate(places):
        depth, accepted = topology.depths[node], node in tokens
        colour = DEPTH_COLOURS[shade(depth) - 1] if accepted and node else "currentColor"
        if node:
            from_x, from_y = places[topology.parents[node]]
            width = 0.8 + 5 * visits[node] / max(visits[0], 1)
            lines.append(
                f'<path class="{"walked" if accepted else "idle"}" stroke="{colour}" stroke-width="{width:.1f}" '
                f'd="M{from_x} {from_y} C{from_x + COLUMN / 2} {from_y} {x - COLUMN / 2} {y} {x} {y}"/>'
            )
        path = topology.paths[node - 1] if node else ()
        name = visible(tokenizer, tokens[node]) if accepted else str(path[-1] + 1)
        labels.append(
            f'<g class="{"walked" if accepted else "idle"}"><title>rank path {path}, '
            f"accepted in {visits[node]} of {visits[0]} steps</title>"
            f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>'
            f'<text x="{x + 8}" y="{y + 4}">{escape(name)}</text></g>'
        )
    wide, high = max(x for x, _ in places) + COLUMN, max(y for _, y in places) + MARGIN
    return (
        f'<div class="dh-tree"><svg width="{wide:.0f}" height="{high:.0f}" role="img" '
        f'aria-label="Draft tree of step {shown + 1}">{"".join(lines)}{"".join(labels)}</svg></div>'
    )


def step_in_words(topology: DraftTree, steps: Sequence[WalkedStep], shown: int) -> str:
    guesses, emitted = topology.num_nodes - 1, len(steps[shown].emitted)
    return (
        f"Step {shown + 1} of {len(steps)}: {_count(guesses, 'guess', 'guesses')}, "
        f"{len(steps[shown].walked) - 1} accepted, {_count(emitted, 'token', 'tokens')} from one forward pass."
    )


def visible(tokenizer: Any, token: int) -> str:
    """A token's text with its white space shown, at most as many characters as fit into a column of the tree."""
    spelled = tokenizer.decode([token], clean_up_tokenization_spaces=False).translate(VISIBLE) or "∅"
    return spelled if len(spelled) <= LONGEST_LABEL else spelled[: LONGEST_LABEL - 1] + "…"


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


def _digits(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
