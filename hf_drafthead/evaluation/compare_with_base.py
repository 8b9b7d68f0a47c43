"""Heads compared with their base: with the tree that is fastest on this hardware, and with the published tree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from hf_drafthead.evaluation.bench import measure
from hf_drafthead.evaluation.measurement import Measurement
from hf_drafthead.evaluation.questions import Question
from hf_drafthead.evaluation.speed import batched, fastest_tree
from hf_drafthead.generation.capture import execution_of
from hf_drafthead.generation.drafting import draft_vocabulary
from hf_drafthead.generation.entries import CalibrationKey, matching, nearest, tree_of
from hf_drafthead.generation.settings import AUTO, DEFAULT_TREE, DraftSettings
from hf_drafthead.generation.tree import DraftTree, RankPath

SIZES = (8, 12, 16, 24, 32)  # nodes, root included
TRIED_PROMPTS = 6


@dataclass(frozen=True)
class BaseComparison:
    """One family against its base: with its fastest tree one prompt at a time, with the published tree in batches."""

    fastest: Measurement
    published: Measurement
    tree: DraftTree

    @property
    def identical(self) -> bool:
        """Whether every output of every run was the base's own."""
        return self.fastest.identical and self.published.identical

    def to_json(self) -> dict[str, Any]:
        """The fields of the run with the fastest tree, and some of the other run's."""
        return {
            **self.fastest.to_json(),
            "identical": self.identical,
            "tree": [list(path) for path in self.tree.paths],
            "tokens_per_step_published_tree": self.published.tokens_per_step,
            "speedup_published_tree": self.published.speedup,
            "batch_size_published_tree": self.published.batch_size,
            "identical_published_tree": self.published.identical,
        }


def compare_with_base(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Question],
    *,
    max_new_tokens: int,
    repeats: int = 1,
    batch_size: int = 8,
    progress: Callable[[], object] = lambda: None,
) -> BaseComparison:
    """Measure a model with the tree that is fastest here, and in batches with the published tree.

    The fastest is the calibrated one; where nothing was calibrated for this device and dtype, one of a few sizes.

    Args:
        model: a model with draft heads.
        tokenizer: its base's.
        prompts: what to continue; the first few also choose the tree.
        max_new_tokens: per prompt, at most.
        repeats: timed runs of each prompt with the fastest tree.
        batch_size: rows of the run with the published tree, padded on the left.
        progress: called after each batch of prompts, see `rounds`.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "progress": progress}
    tree = calibrated_tree(model)
    if tree is None:
        tree = fastest_tree(model, tokenizer, prompts[:TRIED_PROMPTS], candidate_trees(model), **options)
    published = DraftTree.resolve(DEFAULT_TREE, model.drafter.max_depth, model.config.get_text_config().vocab_size)
    return BaseComparison(
        fastest=measure(model, tokenizer, prompts, tree=tree, repeats=repeats, **options),
        published=measure(model, tokenizer, prompts, tree=published, repeats=1, batch_size=batch_size, **options),
        tree=tree,
    )


def rounds(prompts: Sequence[Question], batch_size: int = 8) -> int:
    """How often a `compare_with_base` over these prompts calls `progress`, at most."""
    return len(prompts[:TRIED_PROMPTS]) + len(prompts) + len(batched(prompts, batch_size))


def calibrated_tree(model: Any, captured: bool = False) -> DraftTree | None:
    """The tree that was measured to be the fastest for one row here, or for the nearest; None where none was."""
    settings = DraftSettings.from_config(model.generation_config)
    call = GenerationConfig(cache_implementation="static" if captured else None)
    key = CalibrationKey.of(model.base, model.drafter, 1, execution_of(model, call))
    entry = matching(settings.calibration, key) or nearest(settings.calibration, key)
    vocabulary = draft_vocabulary(model.base, model.drafter)
    return None if entry is None else tree_of(entry, model.drafter.max_depth, vocabulary)


def candidate_trees(model: Any, sizes: Sequence[int] = SIZES) -> list[DraftTree]:
    """The trees to try: of these sizes along the model's own rank paths, or the one tree that it names.

    Where they are stored in descending order of acceptance, the first n are the best tree of n + 1 nodes.
    """
    stored = getattr(model.generation_config, "draft_tree", None) or DEFAULT_TREE
    stored = DEFAULT_TREE if stored in ("dynamic", AUTO) or isinstance(stored, dict) else stored
    if isinstance(stored, str):
        return [DraftTree.resolve(stored, model.drafter.max_depth, model.config.get_text_config().vocab_size)]
    paths = [tuple(path) for path in stored]
    return [DraftTree(grown(paths, size - 1)) for size in sizes if size - 1 <= len(paths)] or [DraftTree(paths)]


def grown(paths: Sequence[RankPath], count: int) -> list[RankPath]:
    """The first `count` paths whose parent is among them.

    >>> grown([(0,), (1,), (0, 0), (0, 1)], 3)
    [(0,), (1,), (0, 0)]
    """
    chosen: list[RankPath] = []
    for path in paths:
        if len(chosen) < count and (len(path) == 1 or path[:-1] in chosen):
            chosen.append(path)
    return chosen
