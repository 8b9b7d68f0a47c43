"""Rebuild the zoo: ``python -m hf_drafthead.zoo.build [--part base --part medusa ...] [--output DIR] [--seed N]``.

Parts are built in order, each from the ones before it. A part that is there already is skipped unless ``--force`` is
given, and an interrupted training goes on from its last checkpoint in the work folder.
"""

import argparse
import json
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import transformers

from hf_drafthead.zoo import ASSETS
from hf_drafthead.zoo.base import ROW, VOCAB_SIZE, save_base, train_base
from hf_drafthead.zoo.corpus import read_corpus, text_hash
from hf_drafthead.zoo.tokenizer import pack, train_tokenizer


@dataclass(frozen=True)
class Build:
    """What every part needs to know: where to write, where to keep checkpoints, the seed, and the command to record."""

    output: Path
    work: Path
    seed: int
    command: str


def build_base(build: Build) -> None:
    """Tokenizer and base, both trained on the corpus."""
    corpus = read_corpus()
    training = [file for file in corpus if not file.held_out]
    tokenizer = train_tokenizer(training, VOCAB_SIZE, ROW)
    rows = pack(tokenizer, training, ROW)
    held_out = pack(tokenizer, [file for file in corpus if file.held_out], ROW)
    steps = 2560
    model, figures = train_base(tokenizer, rows, held_out, build.work / "base", steps=steps, seed=build.seed)
    folder = build.output / "base"
    save_base(model, folder)
    tokenizer.save_pretrained(folder)
    text = {
        "text": f"standard library of Python {platform.python_version()}",
        "text_files": len(training),
        "text_sha256": text_hash(training),
        "text_tokens": rows.numel(),
    }
    write_summary(build, folder, {**text, **figures})


def write_summary(build: Build, folder: Path, figures: dict) -> None:
    """Write ``training_summary.json``: how these weights came to be."""
    summary = {
        "command": build.command,
        "seed": build.seed,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "threads": torch.get_num_threads(),
        **figures,
    }
    (folder / "training_summary.json").write_text(json.dumps(summary, indent=2) + "\n")


PARTS = {"base": build_base}


def main(arguments: list[str] | None = None) -> None:
    """Build the parts asked for, all of them by default."""
    parser = argparse.ArgumentParser(prog="python -m hf_drafthead.zoo.build", description="Rebuild the bundled zoo.")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="build this part (may be repeated)")
    parser.add_argument("--output", type=Path, default=ASSETS, help="where the models go")
    parser.add_argument("--work", type=Path, default=Path(".zoo-build"), help="where checkpoints are kept")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="build parts again that are there already")
    given = parser.parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    build = Build(given.output, given.work, given.seed, " ".join(["python -m hf_drafthead.zoo.build", *words]))
    for part in PARTS:
        if given.part and part not in given.part:
            continue
        if (build.output / part / "training_summary.json").is_file() and not given.force:
            print(f"{part}: there already, skipped (--force builds it again)")
            continue
        if given.force:
            shutil.rmtree(build.work / part, ignore_errors=True)
        print(f"{part}: building", flush=True)
        PARTS[part](build)
        print(f"{part}: done, {build.output / part}", flush=True)


if __name__ == "__main__":
    main()
