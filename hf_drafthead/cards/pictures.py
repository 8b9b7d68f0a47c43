"""The pictures of a card: the same facts give the same bytes."""

import itertools
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_drafthead.generation.tree import DraftTree

TITLE = 100  # characters of a line
INK, PAPER = "#333333", "#ffffff"


def draw_trees(trees: Mapping[str, DraftTree], path: Path) -> None:
    """Trees by title from left to right, one below the other: a dot per node, labelled with its rank there."""
    from matplotlib.figure import Figure  # takes its time

    rows = [rows_of_nodes(tree) for tree in trees.values()]
    titles = [textwrap.fill(title, TITLE) for title in trees]  # a wider one would leave its tree no room
    sizes = [
        min(max(1.5, 0.16 * (max(places) + 1)), 16) + 0.15 * title.count("\n") for places, title in zip(rows, titles)
    ]
    figure = Figure(figsize=(7, sum(sizes)), layout="constrained")
    panels = figure.subplots(len(trees), 1, squeeze=False, height_ratios=sizes)[:, 0]
    for axes, title, tree, places in zip(panels, titles, trees.values(), rows):
        axes.set_title(title, size=8, color=INK, loc="left")
        axes.axis("off")
        axes.scatter(tree.depths, [-row for row in places], s=60, color=PAPER, edgecolors=INK, linewidths=0.6, zorder=2)
        for node, path_of_node in enumerate(tree.paths, start=1):
            ends = [(tree.depths[end], -places[end]) for end in (tree.parents[node], node)]
            axes.plot(*zip(*ends), color=INK, lw=0.6, zorder=1)
            axes.text(*ends[1], str(path_of_node[-1]), size=5, ha="center", va="center", color=INK, zorder=3)
    _save_picture(figure, path)


def draw_accuracies(accuracies: dict[int, list[float]], path: Path) -> None:
    """The accuracy of each head: by k, its share (0 to 1) of positions with the true token among its best k."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    plot_accuracies(axes, accuracies)
    axes.legend(frameon=False)
    _save_picture(figure, path)


def plot_accuracies(axes: Any, accuracies: dict[int, list[float]], label: str = "", colour: str = "C0") -> None:
    """By head, how often its best guess is right, and one of the most that were measured (Amphista, arXiv 2406.13170,
    figure 1)."""
    for k, style in zip(sorted({min(accuracies), max(accuracies)}), ("o-", "o--")):
        heads = range(1, len(accuracies[k]) + 1)
        axes.plot(heads, [100 * share for share in accuracies[k]], style, color=colour, label=f"{label}top {k}")
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel="head", ylabel="accuracy in %", ylim=(0, 100))


def rows_of_nodes(tree: DraftTree) -> list[float]:
    """The row of each node: leaves one below the other, every other node in the middle of its children."""
    rows, leaves = [0.0] * tree.num_nodes, itertools.count()

    def place(node: int) -> float:
        children = [place(child) for child in tree.children(node)]
        rows[node] = (children[0] + children[-1]) / 2 if children else next(leaves)
        return rows[node]

    place(0)
    return rows


def _save_picture(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150, metadata={"Software": None})  # the version there would change the bytes
