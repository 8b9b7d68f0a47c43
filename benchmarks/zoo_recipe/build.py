"""Rebuild the zoo: ``python -m benchmarks.zoo_recipe.build [--part base --part medusa ...] [--output DIR] [--seed N]``.

Parts are built in order, each from the ones before it. An existing part is skipped unless ``--force`` is given, and an
interrupted training is resumed from its last checkpoint in the work folder.

The trees of each family depend on the machine and are a part of their own: ``--part medusa-trees --force``
measures them anew. ``--part medusa-captured-trees`` does the same for compiled steps, which takes long and is done only
where it is asked for.
"""

import argparse
import functools
import json
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_drafthead.training.examples import PreparedData
from hf_drafthead.training.record import provenance
from hf_drafthead.zoo import ASSETS

from .base import ROW, VOCAB_SIZE, save_base, train_base
from .corpus import SourceFile, read_corpus, text_hash
from .heads import FAMILIES, save_heads, store_tree, train_heads
from .own_text import own_text
from .prompts import BUNDLED, cut_prompts, write_prompts
from .tokenizer import pack, train_tokenizer
from .trees import calibrate_heads, is_calibrated

OWN_TEXTS = 4096  # texts of the base that every family learns from
STEPS = 1500
LICENSE = {"license": "apache-2.0"}  # of the heads: the project's own


@dataclass(frozen=True)
class Build:
    """What every part needs: the output folder, the folder of checkpoints, the seed, and the command to record."""

    output: Path
    work: Path
    seed: int
    command: str


def build_prompts(build: Build) -> None:
    """Some prompts from the held-out files."""
    build.output.mkdir(parents=True, exist_ok=True)
    write_prompts(cut_prompts(read_corpus(), BUNDLED), build.output / "prompts.jsonl")


def build_base(build: Build) -> None:
    """Tokenizer and base, both trained on the corpus."""
    training, held_out = _split_corpus()
    tokenizer = train_tokenizer(training, VOCAB_SIZE, ROW)
    rows, held_out_rows = pack(tokenizer, training, ROW), pack(tokenizer, held_out, ROW)
    model, figures = train_base(tokenizer, rows, held_out_rows, build.work / "base", steps=2560, seed=build.seed)
    folder = build.output / "base"
    save_base(model, folder)
    tokenizer.save_pretrained(folder)
    _write_summary(build, folder, {**_about(training), "text_tokens": rows.numel(), **figures})


def own_data(
    base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, work: Path, texts: int = OWN_TEXTS
) -> PreparedData:
    """The training data of every family: text of the base, which continues excerpts of the corpus."""
    training, held_out = _split_corpus()
    rows, held_out_rows = pack(tokenizer, training, ROW), pack(tokenizer, held_out, ROW)
    learnt = own_text(base, rows, texts, work / "own_text.safetensors", seed=0)
    checked = own_text(base, held_out_rows, 64, work / "own_text_held_out.safetensors", seed=0)
    text = _about(training)
    return PreparedData(learnt, checked, f"{text['text']}, continued by the base", text["text_sha256"])


def build_heads(build: Build, family: str) -> None:
    """One family's heads for the base that is in the output folder, trained on what that base writes."""
    place, folder = build.output / "base", build.output / family
    tokenizer = AutoTokenizer.from_pretrained(place)
    data = own_data(AutoModelForCausalLM.from_pretrained(place), tokenizer, build.work)
    trained = train_heads(FAMILIES[family], place, data, build.work / family, steps=STEPS, seed=build.seed)
    store_tree(trained.model, data.rows.rows[:256], data.rows.given)
    save_heads(trained.model, folder)
    tokenizer.save_pretrained(folder)
    figures = {name: value for name, value in trained.summary.items() if name != "base"}
    own_tokens = data.rows.rows[:, data.rows.given :].numel()
    _write_summary(build, folder, {**figures, "own_texts": len(data.rows), "own_text_tokens": own_tokens, **LICENSE})


PARTS: dict[str, Callable[[Build], None]] = {
    "prompts": build_prompts,
    "base": build_base,
    **{family: functools.partial(build_heads, family=family) for family in FAMILIES},
}
# part: the family, and whether its trees are for compiled steps
TREES = {f"{family}-trees": (family, False) for family in FAMILIES}
CAPTURED_TREES = {f"{family}-captured-trees": (family, True) for family in FAMILIES}
EVERY_PART = [*PARTS, *TREES, *CAPTURED_TREES]


def main(arguments: list[str] | None = None) -> None:
    """Build the parts asked for, all of them by default."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo_recipe.build", description="Rebuild the bundled zoo."
    )
    parser.add_argument("--part", action="append", choices=EVERY_PART, help="build this part (may be repeated)")
    parser.add_argument("--output", type=Path, default=ASSETS, help="where the models go")
    parser.add_argument("--work", type=Path, default=Path(".zoo-build"), help="where checkpoints are kept")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights and of the order of rows")
    parser.add_argument("--force", action="store_true", help="build parts again that are there already")
    given = parser.parse_args(arguments)
    words = [f"--part {part}" for part in given.part or ()] + [f"--seed {given.seed}"]
    build = Build(given.output, given.work, given.seed, " ".join(["python -m benchmarks.zoo_recipe.build", *words]))
    asked = given.part or [*PARTS, *TREES]
    for part in (one for one in EVERY_PART if one in asked):
        if not given.force and _is_built(build, part):
            print(f"{part}: exists, skipped (--force builds it again)")
            continue
        print(f"{part}: building", flush=True)
        if part in PARTS:
            if given.force:
                shutil.rmtree(build.work / part, ignore_errors=True)
            PARTS[part](build)
        else:
            family, captured = (TREES | CAPTURED_TREES)[part]
            calibrate_heads(build.output / family, captured=captured, again=given.force)
        print(f"{part}: done", flush=True)


def _is_built(build: Build, part: str) -> bool:
    if part not in PARTS:
        family, captured = (TREES | CAPTURED_TREES)[part]
        return is_calibrated(build.output / family, captured=captured)
    return (build.output / ("prompts.jsonl" if part == "prompts" else f"{part}/training_summary.json")).is_file()


def _split_corpus() -> tuple[list[SourceFile], list[SourceFile]]:
    """Training and held-out files."""
    corpus = read_corpus()
    return [file for file in corpus if not file.held_out], [file for file in corpus if file.held_out]


def _about(training: list[SourceFile]) -> dict[str, Any]:
    """Source and hash of the text."""
    return {
        "text": f"standard library of Python {platform.python_version()}",
        "text_files": len(training),
        "text_sha256": text_hash(training),
    }


def _write_summary(build: Build, folder: Path, figures: dict[str, Any]) -> None:
    """Write ``training_summary.json``: how these weights were trained."""
    summary = {
        **provenance(),
        "tokenizers": tokenizers.__version__,
        "threads": torch.get_num_threads(),
        **figures,
        "command": build.command,
        "seed": build.seed,
    }
    (folder / "training_summary.json").write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
