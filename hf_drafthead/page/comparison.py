"""What a visitor asks for: one prompt, decoded by the heads and by the base in turns, readable while it is written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from hf_drafthead.evaluation.calls import BASE, HEADS, as_tokens, check_room, drafted, encode, sampling
from hf_drafthead.evaluation.measurement import guess_depths
from hf_drafthead.evaluation.questions import chat_text
from hf_drafthead.evaluation.rounding import BaseCall, FirstDifference
from hf_drafthead.generation import StepRecord
from hf_drafthead.generation.settings import AUTO, DraftSettings
from hf_drafthead.generation.state import draft_vocabulary
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.page.turns import Stopped, Turns

Message = dict[str, str]  # role and content, as chat templates take them
OWN_TREE = "the model's own"
REFRESH = 0.1  # seconds between two looks at what was written


@dataclass(frozen=True)
class WalkedStep:
    root: int  # token of the tree's root
    emitted: tuple[int, ...]  # tokens that the step gave, up to the end of the text
    walked: tuple[int, ...]  # nodes that were accepted, from the root (node 0) down, one for each token emitted
    copied: int = 0  # how many of the accepted guesses were copies from the text

    @property
    def tokens(self) -> dict[int, int]:
        return dict(zip(self.walked, (self.root, *self.emitted)))


@dataclass
class Side:
    """What one generation has written so far; its own thread appends, and any other may read."""

    name: str
    tokens: list[int] = field(default_factory=list)  # new ones
    steps: list[WalkedStep] = field(default_factory=list)  # of the heads, empty for the base
    seconds: float = 0.0  # of its own turns
    drafted: bool | None = None  # whether guesses were drafted, None while that is not known
    finished: bool = False  # whether it wrote to its end
    error: BaseException | None = None  # what ended it instead

    @property
    def depths(self) -> list[int]:
        """For each token the depth of the guess that it was, 0 for the base's own, COPIED for a copy."""
        steps = list(self.steps)
        accepted_lengths = torch.tensor([len(step.emitted) for step in steps], dtype=torch.long)
        depths = guess_depths(accepted_lengths, [step.copied for step in steps])
        count = len(self.tokens)
        return (depths + [0] * count)[:count]

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that one forward of the base gave after the prompt's; None where there was none."""
        if self.name == BASE:
            return 1.0 if len(self.tokens) > 1 else None
        steps = list(self.steps)
        return sum(len(step.emitted) for step in steps) / len(steps) if steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens per second of its own turns, the prompt's forward included."""
        return len(self.tokens) / self.seconds if self.seconds > 0 else None


class SideBySide:
    """Lets heads, which draft and accept as `drafting` says and copy tokens of the text, and base continue one prompt:
    `inputs` (1, T)."""

    def __init__(
        self,
        model: Any,
        inputs: Mapping[str, torch.Tensor],
        settings: Mapping[str, Any],
        drafting: DraftSettings,
        *,
        copies: int = 0,
        seed: int = 0,
        with_base: bool = True,
    ):
        self._base, self._prompt, self._settings, self._seed = model.base, inputs, settings, seed
        self._exact = drafting.acceptance == "exact"
        device = model.base.device
        names = [HEADS, BASE] if with_base else [HEADS]
        self.sides = {name: Side(name) for name in names}
        self._turns = Turns(names, device, seed=seed)
        chosen = drafting.draft_tree
        drawn = isinstance(chosen, DraftTree) and not copies  # only what is the same in every step
        self.tree = chosen if drawn else None
        ours = {name: getattr(drafting, name) for name in ("draft_tree", "acceptance")}
        ours["prompt_lookup_num_tokens"] = copies or None
        common = {**inputs, **settings, "return_dict_in_generate": True}
        self._calls: dict[str, Callable[..., Any]] = {
            HEADS: lambda **call: model.generate(**common, **ours, on_step=self._record, **call),
            BASE: lambda **call: model.base.generate(**common, **call),
        }

    def run(self) -> Iterator[None]:
        """Start, and come back every tenth of a second and once more at the end; raises what `generate` raised."""
        threads = [threading.Thread(target=self._write, args=(side,), daemon=True) for side in self.sides.values()]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                for thread in threads:
                    thread.join(REFRESH / len(threads))
                self._read_clocks()
                yield
        finally:
            self.stop()
            for thread in threads:
                thread.join()
            self._read_clocks()
        for side in self.sides.values():
            if side.error is not None:
                raise side.error
        yield

    def stop(self) -> None:
        self._turns.stop()

    @property
    def same(self) -> bool | None:
        """Whether both wrote the same tokens; None until both have finished, or where the base did not write."""
        if BASE not in self.sides or not all(side.finished for side in self.sides.values()):
            return None
        return self.sides[HEADS].tokens == self.sides[BASE].tokens

    @property
    def difference(self) -> FirstDifference | None:
        """Where the texts of both sides part, and whether rounding explains it; None where they should not be equal."""
        if self.same is not False or not self._exact:
            return None
        texts = self.sides[BASE].tokens, self.sides[HEADS].tokens
        return BaseCall(self._base, self._prompt, self._settings, self._seed).first_difference(0, *texts)

    @property
    def speedup(self) -> float | None:
        """Tokens per second of the heads over those of the base, once both have finished."""
        if self.same is None:
            return None
        ours, theirs = (self.sides[name].tokens_per_second for name in (HEADS, BASE))
        return ours / theirs if ours and theirs else None

    def _write(self, side: Side) -> None:
        try:
            with self._turns.hold(side.name):
                output = self._calls[side.name](streamer=_Tokens(side, self._turns))
            side.drafted = drafted(output) if side.name == HEADS else None
            side.finished = True
        except Stopped:
            pass
        except BaseException as error:  # handed to whoever reads: a thread has nobody to raise it to
            side.error = error

    def _record(self, record: StepRecord) -> None:
        """Note one step; where it is called, the heads draft, and it is called when the step's tokens are written."""
        heads = self.sides[HEADS]
        heads.drafted = True
        if record.step:  # 0 is the prompt's own forward
            count = record.counts[0]
            root = heads.tokens[-count - 1]
            copied = min(record.copied()[0], count) if record.copied else 0
            walked = tuple(record.nodes[0][:count])
            heads.steps.append(WalkedStep(root, tuple(record.tokens[0][:count]), walked, copied))
        self._turns.pause(HEADS)

    def _read_clocks(self) -> None:
        for name, side in self.sides.items():
            side.seconds = self._turns.seconds(name)


class _Tokens(BaseStreamer):
    """Appends every new token to a side, and lets the other side have its turn."""

    def __init__(self, side: Side, turns: Turns):
        self._side = side
        self._turns = turns
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self._side.tokens += value.flatten().tolist()
        self._prompt_seen = True
        if not self._side.drafted:  # else the pause comes when the whole step is noted
            self._turns.pause(self._side.name)

    def end(self) -> None:
        """Nothing was held back."""


@dataclass(frozen=True)
class Asked:
    written: str  # the prompt, or the next message
    chat: bool  # whether the chat template applies
    messages: list[Message]  # the conversation so far
    tree: str  # `OWN_TREE`, a name that `draft_tree` takes, or rank paths as JSON
    temperature: float  # 0 is greedy
    acceptance: str
    max_new_tokens: int
    copies: int  # tokens copied from the text in each step
    seed: int  # of the sampling
    with_base: bool  # whether the base writes too

    @property
    def conversation(self) -> list[Message]:
        return [*self.messages, {"role": "user", "content": self.written}]

    def comparison(self, model: Any, tokenizer: Any) -> SideBySide:
        """The two generations, ready to run; a TypeError or ValueError of what does not fit."""
        settings = {"max_new_tokens": self.max_new_tokens, **sampling(self.temperature)}
        settings = as_tokens(model, settings, tokenizer)
        if not self.written.strip():
            raise ValueError("the prompt is empty: write the text that the model shall continue.")
        text = chat_text(tokenizer, self.conversation) if self.chat else self.written
        inputs = encode(model, tokenizer, [text], special_tokens=not self.chat)
        check_room(model, inputs["input_ids"].shape[1], self.max_new_tokens)
        how: dict[str, Any] = {"copies": self.copies, "seed": self.seed, "with_base": self.with_base}
        return SideBySide(model, inputs, settings, self._drafting(model), **how)

    def _drafting(self, model: Any) -> DraftSettings:
        """How the heads draft: as asked, else as their generation config says."""
        name = self.tree.strip()
        tree: Any = None if name in ("", OWN_TREE) else DraftTree.from_json(name) if name.startswith("[") else name
        settings = DraftSettings.from_config(model.generation_config, draft_tree=tree, acceptance=self.acceptance)
        if settings.draft_tree == AUTO:
            return settings
        plan = settings.plan(model.drafter.max_depth, draft_vocabulary(model.base, model.drafter))
        return replace(settings, draft_tree=plan.tree)
