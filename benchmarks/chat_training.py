"""Heads of one family for the chat model, from the shards that `chat_heads.py questions-and-answers` wrote.

    python benchmarks/chat_training.py eagle3 BASE SHARDS OUTPUT --seconds 60
    python benchmarks/chat_training.py medusa BASE SHARDS OUTPUT --tokens 200000 --epochs 1 --device cpu   # a trial

BASE is a folder of safetensors with its tokenizer. torch, transformers and accelerate are all it needs besides. The
papers' recipes are for tens of millions of tokens and warm up for longer than a run over two to four million takes:
here it is the quick one (`train --recipe quick`), which ends at the latest when `--seconds` are over. All families
learn the base's distribution, at its answers, of a draft vocabulary.

OUTPUT holds the heads in the type of the base, `training_summary.json`, and `history.json`: losses, and the accuracies
by depth at the end.
"""

import os

os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")  # cuDNN builds a plan for every new length
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset

from hf_drafthead.training import train_heads
from hf_drafthead.training.examples import PreparedData
from hf_drafthead.training.heads_loss import IGNORED

LONGEST = 1024  # tokens of a row; longer chats lose their end
SHARED = {"share_lm_head": True}
FIELDS: dict[str, dict[str, Any]] = {
    "medusa": SHARED,
    "hydra": SHARED,
    "hydra++": SHARED,
    "amphista": SHARED,
    "amphista-alpha": SHARED,
    "eagle": {},
    "eagle3": {"num_draft_heads": 6},
    "eagle3.1": {"num_draft_heads": 6},
    "mtp": {"num_draft_heads": 6},
    "dflash": {"num_layers": 3, "sample_from_anchor": True},
    "dflash2": {"num_layers": 3, "sample_from_anchor": True, "selector_rank": 64},
    "dspark": {"num_layers": 3, "markov_rank": 64},
    "peagle": {"num_draft_heads": 6},
    "draft-model": {},
}
RECIPE: dict[str, Any] = {"recipe": "quick", "next_token_weight": 0.0, "teacher_weight": 1.0}
DIFFERENT: dict[str, dict[str, Any]] = {
    "eagle": {"feature_weight": 1.0, "feature_noise": 0.05},
    "hydra++": {"head_decay": 1.0},
    # answers are short: more places that blocks begin at would each be seen many times before the next text
    "dflash": {"num_anchors": 64},
    "dflash2": {"num_anchors": 64},
    # the L1 distance, DSpark's own, hardly moves a token that is unlikely, as the right ones are in the first steps
    "dspark": {"num_anchors": 64, "distance_weight": 0.0},
}


class ShardRows(Dataset):
    """Chats of some shards, with labels on their answers.

    Args:
        folder: with `index.json` and the shards.
        tokens: stop after about so many.

    Attributes:
        sha256: of the shards that were read.
        labels: tokens of answers.
    """

    def __init__(self, folder: Path, tokens: float) -> None:
        index = json.loads((folder / "index.json").read_text())
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        hashes, left = [], tokens
        for shard in index["shards"]:
            tensors = load_file(folder / shard["file"])
            hashes.append(shard["sha256"])
            text = tensors["tokens"].to(torch.int32)
            labels = torch.full_like(text, IGNORED)
            for _, begin, end, _ in tensors["answers"].tolist():
                labels[begin:end] = text[begin:end]
            bounds = tensors["rows"].tolist()
            for begin, end in zip(bounds, bounds[1:]):
                end = min(end, begin + LONGEST)
                if left > 0 and bool((labels[begin + 1 : end] != IGNORED).any()):
                    self.rows.append((text[begin:end], labels[begin:end]))
                    left -= end - begin
        self.sha256 = hashlib.sha256("".join(hashes).encode()).hexdigest()
        self.labels = sum(int((labels != IGNORED).sum()) for _, labels in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, labels = self.rows[index]
        return {"input_ids": ids.long(), "labels": labels.long()}


def train(args: argparse.Namespace) -> None:
    rows = ShardRows(Path(args.shards), args.tokens)
    held_out = [rows[index] for index in range(len(rows) - args.held_out, len(rows))]
    del rows.rows[len(rows) - args.held_out :]
    data = PreparedData(rows, held_out, str(args.shards), rows.sha256)
    recipe = {**RECIPE, **DIFFERENT.get(args.family, {})}
    recipe |= {
        name: value for name, value in (("learning_rate", args.rate), ("num_train_epochs", args.epochs)) if value
    }
    arguments = {
        "per_device_train_batch_size": args.batch,
        "per_device_eval_batch_size": args.batch,
        "train_sampling_strategy": "group_by_length",
        "save_strategy": "no",
        "eval_strategy": "no",  # once, at the end
        "logging_steps": 20,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": args.device == "cpu",
        "hours": args.seconds / 3600 if args.seconds else None,
        "seed": args.seed,
    }
    trained = train_heads(
        args.base,
        args.family,
        data,
        args.output,
        heads=args.heads,
        fields=None
        if args.heads
        else {**FIELDS[args.family], "draft_vocab_size": args.draft_vocab_size or None, **json.loads(args.fields)},
        load={"dtype": getattr(torch, args.dtype)},
        tell=lambda line: print(line, flush=True),
        **{**arguments, **recipe, **json.loads(args.set)},
    )
    about = {"arguments": vars(args), "answer_tokens": rows.labels, "history": trained.history}
    (Path(args.output) / "history.json").write_text(json.dumps(about, indent=1, default=str) + "\n")
    figures = {name: round(value, 4) for name, value in trained.summary["held_out"].items() if "top1" in name}
    print(
        f"{args.family}: {trained.summary['steps']} steps in {3600 * trained.summary['hours']:.0f} s, held-out loss "
        f"{trained.summary['held_out']['loss']:.3f}, {figures}, expected tokens per step "
        f"{trained.summary['tokens_per_step']}, coverage {trained.summary['draft_vocab_coverage']}"
        + (f"; peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if args.device != "cpu" else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=sorted(FIELDS))
    parser.add_argument("base", help="folder of safetensors")
    parser.add_argument("shards", help="folder of the shards")
    parser.add_argument("output", help="folder of the heads")
    parser.add_argument("--heads", help="train these trained heads further")
    parser.add_argument("--seconds", type=float, help="of training, at most; loading and evaluation are not counted")
    parser.add_argument("--tokens", type=float, default=float("inf"), help="of the shards that are used")
    parser.add_argument("--epochs", type=float, help="default: 3")
    parser.add_argument("--rate", type=float, help="peak learning rate; default: 1e-3")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step")
    parser.add_argument("--draft-vocab-size", type=int, default=8192, help="0 for all tokens")
    parser.add_argument("--held-out", type=int, default=64, help="rows")
    parser.add_argument("--fields", default="{}", help="config fields of the heads, as JSON")
    parser.add_argument("--set", default="{}", help="training arguments, as JSON")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", help="of the base while heads are trained")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
