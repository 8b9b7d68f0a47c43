"""Products of few rows on a CPU, x W^T as a linear layer computes it against (W x^T)^T, in float32.

    python benchmarks/products.py

`hf_drafthead.generation.compiling` says which products of compiled steps are written the second way.
Both take turns over as many weights as a model of that width has; the fastest of the repeats counts.
"""

from __future__ import annotations

import argparse

import torch

from hf_drafthead.trees.timing import time_interleaved

# features out, features in, weights
SHAPES = [
    (96, 96, 64),
    (256, 96, 64),
    (192, 192, 64),
    (768, 192, 32),
    (512, 512, 32),
    (1408, 512, 16),
    (1024, 1024, 32),
    (1024, 2816, 12),
    (32000, 1024, 1),
]
ROWS = (4, 8, 12, 16, 32, 48, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    print("share of the time of a linear layer\n" + f"{'weight':<16}" + "".join(f"{rows:>4} rows" for rows in ROWS))
    for features_out, features_in, count in SHAPES:
        weights = [torch.randn(features_out, features_in) for _ in range(count)]
        shares = [share(weights, torch.randn(rows, features_in), args.repeats) for rows in ROWS]
        print(f"{features_out:>6} x {features_in:<7}" + "".join(f"{one:>9.2f}" for one in shares), flush=True)


def share(weights: list[torch.Tensor], rows: torch.Tensor, repeats: int) -> float:
    """Seconds of the transposed products over those of linear layers."""
    runs = {
        "linear": lambda: [torch.nn.functional.linear(rows, weight) for weight in weights],
        "transposed": lambda: [torch.mm(weight, rows.t()).t() for weight in weights],
    }
    time_interleaved(runs, 1, rows.device)
    _, seconds = time_interleaved(runs, repeats, rows.device)
    return min(seconds["transposed"]) / min(seconds["linear"])


if __name__ == "__main__":
    main()
