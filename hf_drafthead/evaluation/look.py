"""A short comparison of several sets of heads on one base: every prompt once, the base once for all of them.

Shapes: B = 1 row.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import transformers

from hf_drafthead.evaluation.acceptance import tokens_per_step
from hf_drafthead.evaluation.compare import Method, decoding_methods
from hf_drafthead.evaluation.compare_with_base import calibrated_tree, candidate_trees
from hf_drafthead.evaluation.loading import load, one_line
from hf_drafthead.evaluation.measurement import BASE, COMPILED, HEADS
from hf_drafthead.evaluation.questions import Question
from hf_drafthead.evaluation.speed import batched, encode_all, fastest_tree, new_tokens, steps_of
from hf_drafthead.generation.memory import out_of_memory
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.trees.timing import wait

INSTALLED = "as installed"
TREE_SIZES = (12, 24)  # nodes; the faster one on the first prompts is taken
TREE_PROMPTS, TREE_TOKENS = 1, 24
CAPTURED = "captured"  # the step of the heads compiled as one program
CAPTURE: dict[str, Any] = {"cache_implementation": "static"}
COMPILING = 30.0  # seconds to expect of a compiler that has never seen the base; two cores took 27 to 35
STEP_OVER_BASE = 1.4  # the seconds that a family's step takes to compile, over those of the base, at most


@dataclass(frozen=True)
class Line:
    """The figures of one way to decode the prompts.

    name: `base` or the family; way: how it was run; prepared: seconds of one-time work in the first call, mostly
    compiling; speedup_over_compiled: of the captured step; notice: why there are no figures, if there are none.
    """

    name: str
    way: str
    tree_nodes: int | None = None
    new_tokens: int = 0
    tokens_per_second: float | None = None
    tokens_per_step: float | None = None
    speedup: float | None = None
    speedup_over_compiled: float | None = None
    identical: bool | None = None
    prepared: float = 0.0
    notice: str | None = None

    def to_json(self) -> dict[str, Any]:
        """All fields, and the versions they were measured with."""
        efficiency = self.speedup / self.tokens_per_step if self.speedup and self.tokens_per_step else None
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        return {**asdict(self), "efficiency": efficiency, **versions}


def of_one_length(prompts: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Prompts (B, P) of different lengths cut to that of the shortest, for a compiled base is compiled for each length.

    The first token is kept, which many tokenizers add to every text, and the end, which is continued.
    """
    length = min(one["input_ids"].shape[1] for one in prompts)
    return [
        {name: torch.cat([rows[:, :1], rows[:, rows.shape[1] - length + 1 :]], dim=1) for name, rows in one.items()}
        for one in prompts
    ]


@dataclass(frozen=True)
class Best:
    """The family with most tokens per step: its name, its model, the tree that it was measured with, and its line."""

    name: str
    model: Any
    tree: DraftTree
    line: Line


@dataclass
class Look:
    """The prompts, and the base's texts for them.

    Args:
        base: causal LM.
        tokenizer: the base's.
        prompts: what to continue, one at a time; their ends, of one length.
        max_new_tokens: per prompt, at most.

    Attributes:
        best: the family with most tokens per step so far.
    """

    base: Any
    tokenizer: Any
    prompts: Sequence[Question]
    max_new_tokens: int
    best: Best | None = field(default=None, init=False)
    _expected: list[torch.Tensor] = field(default_factory=list, init=False, repr=False)

    def lines(self, families: Mapping[str, str], compile_within: float | None = 0.0) -> Iterator[Line]:
        """The base, then each family as soon as it is measured, then what is compiled.

        Compiled are the base and the step of the family with most tokens per step, where that is possible here and
        expected to be done in time; a line without figures says why not. Tokens per step are the same in every run,
        while the speed on a few prompts is not.

        Args:
            families: folder or id of the heads, by name; at least one.
            compile_within: seconds from now after which nothing compiled should run; None: no limit; 0: compile
                nothing.

        Raises:
            OSError, ValueError: as `load` does, or a prompt leaves the base no room.
        """
        start = time.perf_counter()
        first, *_ = families.values()
        model, _ = load(first, base_model=self.base)
        runners = decoding_methods(model, self.tokenizer, compare=[COMPILED])
        given = encode_all(model, self.tokenizer, batched(self.prompts, 1), self.max_new_tokens)
        self._given = of_one_length(given)
        yield self._measure(model, BASE, INSTALLED, runners[BASE])
        for name, path in families.items():
            model, _ = load(path, base_model=self.base)
            tree = self._tree(model)
            line = self._heads(model, name, INSTALLED, tree)
            if self.best is None or (line.tokens_per_step or 0) > (self.best.line.tokens_per_step or 0):
                self.best = Best(name, model, tree, line)
            yield line
        assert self.best is not None
        best = self.best
        if compile_within == 0:
            return

        def no_time(seconds: float) -> str | None:
            expected = time.perf_counter() - start + seconds
            if compile_within is None or expected <= compile_within:
                return None
            return f"left out: with about {seconds:.0f} s for compiling it would end after {expected:.0f} s"

        late = no_time(COMPILING)
        if late is not None:
            yield Line(BASE, COMPILED, notice=late)
            return
        compiled = self._measure(model, BASE, COMPILED, runners[COMPILED], beside=runners[BASE])
        yield compiled
        if compiled.notice is not None:
            return
        late = no_time(compiled.prepared * STEP_OVER_BASE)
        if late is not None:
            yield Line(best.name, CAPTURED, notice=late)
            return
        tree = calibrated_tree(best.model, captured=True) or best.tree
        yield self._heads(best.model, best.name, CAPTURED, tree, CAPTURE, compiled)

    def _heads(
        self,
        model: Any,
        name: str,
        way: str,
        tree: DraftTree,
        settings: Mapping[str, Any] = MappingProxyType({}),
        compiled: Line | None = None,
    ) -> Line:
        runners = decoding_methods(model, self.tokenizer, tree=tree, acceptance=settings)
        return self._measure(
            model, name, way, runners[HEADS], beside=runners[BASE], compiled=compiled, nodes=tree.num_nodes
        )

    def _tree(self, model: Any) -> DraftTree:
        """The calibrated tree; without one the faster of a few trees, on a few prompts."""
        calibrated = calibrated_tree(model)
        if calibrated is not None:
            return calibrated
        found = [tree for tree in candidate_trees(model) if tree.num_nodes in TREE_SIZES] or candidate_trees(model)[:1]
        if len(found) == 1:
            return found[0]
        tokens = min(TREE_TOKENS, self.max_new_tokens)
        return fastest_tree(model, self.tokenizer, self.prompts[:TREE_PROMPTS], found, max_new_tokens=tokens)

    def _measure(
        self,
        model: Any,
        name: str,
        way: str,
        runner: Method,
        *,
        beside: Method | None = None,
        compiled: Line | None = None,
        nodes: int | None = None,
    ) -> Line:
        """Every prompt once, after one call that is not timed.

        Args:
            beside: the base as installed, which takes turns on every prompt: what else a machine does, it does to both.
            compiled: the base compiled.
        """
        settings = {"do_sample": False, "max_new_tokens": self.max_new_tokens}
        device = self.base.device

        def timed(method: Method, given: Mapping[str, torch.Tensor]) -> tuple[Any, float]:
            wait(device)
            start = time.perf_counter()
            output = method(given, settings)
            wait(device)
            return output, time.perf_counter() - start

        try:
            _, prepared = timed(runner, self._given[0])
        except Exception as error:  # of a compiler; the base can be measured without one
            if way != COMPILED or out_of_memory(error):
                raise
            return Line(name, way, notice=f"not possible here: {one_line(error)}")
        base_seconds, runs = 0.0, []
        for given in self._given:
            base_seconds += 0.0 if beside is None else timed(beside, given)[1]
            runs.append(timed(runner, given))
        sequences = [getattr(output, "sequences", output) for output, _ in runs]
        self._expected = self._expected or sequences
        tokens = sum(new_tokens(model, given, found) for given, found in zip(self._given, sequences))
        own_seconds = sum(seconds for _, seconds in runs)
        pace = tokens / own_seconds
        rate = compiled.tokens_per_second if compiled is not None else None
        return Line(
            name,
            way,
            tree_nodes=nodes,
            new_tokens=tokens,
            tokens_per_second=pace,
            tokens_per_step=None if nodes is None else tokens_per_step(steps_of(output) for output, _ in runs),
            speedup=None if beside is None else base_seconds / own_seconds,
            speedup_over_compiled=pace / rate if rate else None,
            identical=all(map(torch.equal, sequences, self._expected)),
            prepared=prepared - runs[0][1],
        )
