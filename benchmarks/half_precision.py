"""How often half precision changes a greedy text, how close the choice was there, and what it would cost to avoid it.

    python benchmarks/half_precision.py HEADS QUESTIONS.jsonl --tokens 128 --limit 40
    python benchmarks/half_precision.py HEADS QUESTIONS.jsonl --rounding-steps 1 2 4 --json half_precision.json

A step verifies several tokens in one forward, and matrix products of another shape round differently. In float32 that
changes nothing that greedy decoding can see; in half precision two tokens whose logits round to neighbours can swap.
Compared with the base's own text of one row are: the text with heads; the base's in batches of eight; what the base
chooses at every position of a forward over the whole text. Each question of the file is asked once, its first turn.

`--rounding-steps K`: an experiment. Where the two best logits of a node that is walked lie within K rounding steps, the
walk ends before it, and the next step is one of the root alone, whose products have the shapes of the base's own steps.
The cost is in tokens per step.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModel, AutoTokenizer

import hf_drafthead  # noqa: F401  registers the families
from hf_drafthead.evaluation.questions import read_questions
from hf_drafthead.generation import decoding, step
from hf_drafthead.generation.runner import Runner
from hf_drafthead.generation.state import packed_lists, unpacked
from hf_drafthead.generation.tree import DraftTree

ROWS = 8  # of the batches in which the base is compared with itself


def rounding_step(logit: float, dtype: torch.dtype) -> float:
    """The distance between neighbours of a dtype at a logit's size."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(logit), 1e-9)))


class RootDecidesTies:
    """Ends walks before a node whose two best logits are near, and takes the root alone next; one row, on a CPU."""

    def __init__(self, rounding_steps: int) -> None:
        self.rounding_steps, self.tie, self.ties = rounding_steps, False, 0
        self.walk = step.walk_greedily

    def walk_before_ties(self, logits: torch.Tensor, candidates: Any, *args: Any) -> torch.Tensor:
        """As `walk_greedily`, up to the first node that is too near a tie."""
        pack = self.walk(logits, candidates, *args)
        self.tie = False
        if logits.shape[1] == 1:
            return pack
        walk, kept = unpacked(pack), int(pack[0, 0])
        tokens, nodes = (row[0, :kept].tolist() for row in (walk.tokens, walk.nodes))
        for at, node in enumerate(nodes):
            best, second = logits[0, node].float().topk(2).values.tolist()
            if best - second <= self.rounding_steps * rounding_step(best, logits.dtype):
                self.tie, self.ties = True, self.ties + 1
                return packed_lists([(at, at, None, tokens[:at], nodes[:at])], max(at, 1), 0, pack.device)
        return pack

    def generate(self, model: Any, **call: Any) -> Any:
        """As the model's `generate`."""
        alone = DraftTree.root_alone()

        def runner(*args: Any) -> Runner:
            *others, tree, state, _ = args
            return Runner(*others, tree, state, lambda state: alone if self.tie else tree)

        self.tie = False
        with (
            mock.patch.object(step, "walk_greedily", self.walk_before_ties),
            mock.patch.object(decoding, "Runner", runner),
        ):
            return model.generate(**call)


class Compared:
    """Texts beside those of the base."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype, self.texts, self.tokens, self.steps, self.new = name, dtype, 0, 0, 0, 0
        self.margins: list[float] = []

    @torch.no_grad()
    def add(self, base: Any, text: torch.Tensor, plain: torch.Tensor, prompt: int) -> None:
        """A text (T,) and the base's own."""
        shorter = min(len(text), len(plain))
        different = (text[:shorter] != plain[:shorter]).nonzero()
        at = int(different[0]) if len(different) else None
        self.texts, self.tokens = self.texts + 1, self.tokens + (len(plain) if at is None else at + 1) - prompt
        if at is not None:
            logits = base(plain[None, :at]).logits[0, -1].float()
            margin = float((logits[plain[at]] - logits[text[at]]).abs())
            self.margins.append(margin / rounding_step(float(logits.max()), self.dtype))

    def report(self) -> dict[str, Any]:
        """The figures; margins are in rounding steps, of a forward over the whole text up to there."""
        return {
            "compared": self.name,
            "texts": self.texts,
            "differ": len(self.margins),
            "differences_per_1000_tokens": round(1000 * len(self.margins) / max(self.tokens, 1), 2),
            "largest_margin": round(max(self.margins, default=0.0), 1),
            "tokens_per_step": round(self.new / self.steps, 3) if self.steps else None,
        }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", help="a model with heads")
    parser.add_argument("questions", type=Path, help="lines with `turns`, as MT-Bench's")
    parser.add_argument("--base", help="the base, where the heads name another place")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="questions, evenly over the file")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--rounding-steps", type=int, nargs="*", default=[])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    model = AutoModel.from_pretrained(
        args.heads, dtype=dtype, **({"base_model": args.base} if args.base else {})
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.base or args.heads, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    questions = read_questions(args.questions)
    questions = questions[:: max(len(questions) // (args.limit or len(questions)), 1)][: args.limit]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question.text}], tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    greedy = {"max_new_tokens": args.tokens, "do_sample": False}
    drafted = {**greedy, "draft_tree": {"dynamic": {"nodes": args.nodes}}, "return_dict_in_generate": True}
    heads, batches, whole = (Compared(name, dtype) for name in ("heads", f"batch of {ROWS}", "whole forward"))
    experiments = [
        (RootDecidesTies(count), Compared(f"root decides within {count}", dtype)) for count in args.rounding_steps
    ]
    plain: list[torch.Tensor] = []
    widths = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        width = inputs["input_ids"].shape[1]
        widths.append(width)
        plain.append(model.base.generate(**inputs, **greedy)[0])
        for generate, compared in [
            (model.generate, heads),
            *((lambda root=root, **call: root.generate(model, **call), to) for root, to in experiments),
        ]:
            output = generate(**inputs, **drafted)
            compared.add(model.base, output.sequences[0], plain[-1], width)
            compared.new += int(output.accepted_lengths.sum())
            compared.steps += output.accepted_lengths.shape[1]
        choices = model.base(plain[-1][None]).logits[0].argmax(-1)
        whole.add(model.base, torch.cat([plain[-1][:width], choices[width - 1 : -1]]), plain[-1], width)
        print(f"{len(plain)} of {len(prompts)}: {heads.report()}", flush=True)
    for first in range(0, len(prompts), ROWS):
        inputs = tokenizer(prompts[first : first + ROWS], return_tensors="pt", padding=True, add_special_tokens=False)
        output = model.base.generate(**inputs, **greedy)[:, inputs["input_ids"].shape[1] :]
        for text, own, width in zip(output, plain[first : first + ROWS], widths[first : first + ROWS]):
            text = torch.cat([own[:width], text])[: len(own)]  # behind its end is padding
            batches.add(model.base, text, own, width)
    reports = [each.report() for each in (heads, batches, whole, *(compared for _, compared in experiments))]
    for report in reports:
        print(json.dumps(report), flush=True)
    if args.json:
        about = {"dtype": args.dtype, "tokens": args.tokens, "nodes": args.nodes, "tree": "dynamic"}
        args.json.write_text(json.dumps({**about, "figures": reports}, indent=1) + "\n")


if __name__ == "__main__":
    main()
