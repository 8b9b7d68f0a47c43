"""Tries what `pip install .` brings today: the README's third line, then the tests of what a release may break.

    .newest/bin/python tests/tools/newest.py [--minutes 8]    # as `make test-newest` does

Where all that was installed is as new as what was tried before, a failure ends with exit code 1. Where transformers or
torch is newer, what broke is said in capitals, and the exit code is 0: nobody's change of today is at fault.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
THIRD_LINE = ["generate", "hf_drafthead/zoo/assets/eagle", "--prompt", "def main(", "--color"]
# Exactness, caches, programs and loading; and what a step does on a GPU, on tensors that are said to be
# there, for which torch needs a build with CUDA.
TESTS = [
    "tests/generation/test_exact.py",
    "tests/generation/test_caches.py",
    "tests/generation/test_inputs.py",
    "tests/generation/test_releases.py",
    "tests/generation/test_compiled.py",
    "tests/generation/test_recorded.py",
    "tests/callers/test_programs.py",
    "tests/modeling/test_loading.py",
    "tests/modeling/test_remote_code.py",
]
EVERY_CASE = ["-m", "slow or not slow", "tests/generation/test_fake_cuda.py"]
TRIED = {"torch": "2.14.1"}  # newer than its pin, which is the newest for CPUs alone; transformers' is the pin


def numbers(text: str) -> list[int]:
    """The three numbers of a version; what names a build of it is left out."""
    return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3]]


def newer(constraints: str) -> list[str]:
    """Which of transformers and torch are newer than any that was tried, as `name version (tried: version)`."""
    pins = dict(line.split("==") for line in constraints.split() if line.startswith("transformers=="))
    return [
        f"{name} {version(name)} (tried: {tried})"
        for name, tried in {**pins, **TRIED}.items()
        if numbers(version(name)) > numbers(tried)
    ]


def third_line() -> str | None:
    """What is wrong with the README's third line; None where guesses of the heads were accepted."""
    command = [str(Path(sys.executable).with_name("hf-drafthead")), *THIRD_LINE]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True)
    print(ended.stdout + ended.stderr, flush=True)
    if ended.returncode:
        return f"the README's third line ends with exit code {ended.returncode}"
    return None if re.search(r"depth 1: [1-9]", ended.stdout) else "the README's third line shows no accepted guess"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="what is not done by then is left out, and said")
    stop = time.monotonic() + 60 * parser.parse_args().minutes
    print(f"installed: transformers {version('transformers')}, torch {version('torch')}", flush=True)
    faults, left_out = [found] if (found := third_line()) else [], []
    for tests in (TESTS, EVERY_CASE):
        pytest = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal", *tests]
        try:
            code = subprocess.run(pytest, cwd=ROOT, timeout=max(stop - time.monotonic(), 1)).returncode
        except subprocess.TimeoutExpired:
            left_out.append(tests[-1] if tests is EVERY_CASE else "tests of exactness and others")
            continue
        if code:
            faults.append(f"tests fail (exit code {code}, see above)")
    if left_out:
        print(f"NOT TESTED TO THE END HERE, for lack of time: {', '.join(left_out)} (make test-newest)")
    if not faults:
        return 0
    later = newer((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    print(("; ".join(faults) + (f", WITH {'; '.join(later)}" if later else "")).upper())
    return 0 if later else 1


if __name__ == "__main__":
    sys.exit(main())
