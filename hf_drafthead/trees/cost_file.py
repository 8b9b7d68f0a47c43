"""The file of what steps cost on this machine, in steps of the base, by situation and by what a step does.

    {situation: {"8 nodes in 3 levels": [cost, median of the times over the shortest, when], ...}}

Where measuring failed, or said what no machine can be, the list says when, and nothing else. Whether a call drafts is
decided by this file and by the tokens, never by the clock: in half precision another number of nodes rounds otherwise.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME
from huggingface_hub.utils import WeakFileLock
from transformers.utils import logging

logger = logging.get_logger(__name__)

FILE = Path(HF_HOME) / "hf_drafthead" / "costs.json"
MOST_SITUATIONS = 1000  # in the file; the oldest are dropped
LOCK_SECONDS = 5.0  # that another process is waited for, which writes the file
Costs = dict[str, dict[str, list[float]]]
_UNWRITTEN: Costs = {}  # what the file could not take, for the rest of this process
_read: tuple[Any, Costs] = (None, {})  # the state of the file when it was read, and its contents


def stored() -> Costs:
    """What the file holds; nothing where there is none, or a damaged one, with a notice."""
    global _read
    try:
        status = os.stat(FILE)
        version = str(FILE), status.st_mtime_ns, status.st_size, status.st_ino
        if _read[0] != version:
            contents = json.loads(FILE.read_text(encoding="utf-8"))
            _check(contents)
            _read = version, contents
        return dict(_read[1])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        logger.warning_once(
            f"{str(FILE)!r}, which holds what steps cost here, cannot be read ({in_one_line(error)}): they are "
            "measured again."
        )
        return {}


def of_situation(situation: str) -> dict[str, list[float]]:
    """What is known of a situation: what the file holds, but for what this process has measured since."""
    known, now = stored().get(situation, {}), time.time()
    own = _UNWRITTEN.get(situation, {}).items()
    return known | {name: times for name, times in own if not times[-1] < known.get(name, times)[-1] <= now}


def keep(situation: str, measured: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Write costs in the place of older ones: cost and spread by what a step does, nothing where they cannot be
    measured. Returns what is known of the situation then."""
    now = time.time()
    known = of_situation(situation) | {name: [*values, now] for name, values in measured.items()}
    try:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(FILE.with_suffix(".lock"), timeout=LOCK_SECONDS):
            everything = stored()
            known = everything.pop(situation, {}) | known
            everything[situation] = known
            draft = FILE.with_name(f"{FILE.name}.{os.getpid()}")
            draft.write_text(json.dumps(dict([*everything.items()][-MOST_SITUATIONS:]), indent=1), encoding="utf-8")
            os.replace(draft, FILE)  # as a whole, or not at all
    except Exception as error:  # a full disk, no right to write, another process that hangs
        logger.warning_once(
            f"{str(FILE)!r} cannot be written ({in_one_line(error)}): what steps cost here is measured again by the "
            "next process."
        )
    _UNWRITTEN[situation] = known  # also for a file that cannot be read again
    return known


def clear() -> int:
    """Remove the file, and return of how many situations it held costs."""
    count = len(stored())
    _UNWRITTEN.clear()
    FILE.unlink(missing_ok=True)
    return count


def _check(contents: Any) -> None:
    """Raise a ValueError for what is no file of costs."""
    if not isinstance(contents, dict) or not all(isinstance(steps, dict) for steps in contents.values()):
        raise ValueError("it holds no costs by situation")
    for times in (times for steps in contents.values() for times in steps.values()):
        numbers = isinstance(times, list) and all(type(each) in (int, float) and 0 < each < 1e12 for each in times)
        if not numbers or len(times) not in (1, 3):
            raise ValueError(f"{str(times)[:20]!r} is no measurement")


def in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
