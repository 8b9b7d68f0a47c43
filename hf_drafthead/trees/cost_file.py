"""The file in which this machine's seconds of steps are kept, by situation and by what a step does.

    {situation: {"8 nodes in 3 levels": [shortest, median, how many were measured, when], ...}}

Where measuring failed, or said what no machine can be, the list says when, and nothing else. Whether a call drafts is
decided by this file and by the tokens, never by the clock: in half precision another number of nodes rounds otherwise.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import tempfile
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
Times = list[float]  # see above
_UNWRITTEN: dict[str, dict[str, Times]] = {}  # what the file could not take, for the rest of this process
_read: tuple[Any, dict[str, dict[str, Times]]] = (None, {})  # the state of the file when it was read, and its contents


def stored() -> dict[str, dict[str, Times]]:
    """What the file holds; nothing where there is none, or a damaged one, with a notice."""
    global _read
    try:
        status = os.stat(FILE)
        version = str(FILE), status.st_mtime_ns, status.st_size, status.st_ino
        if _read[0] != version:
            _read = version, _checked(json.loads(FILE.read_text(encoding="utf-8")))
        return _read[1]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        logger.warning_once(
            f"{str(FILE)!r}, which holds what steps cost here, cannot be read ({in_one_line(error)}): they are "
            "measured again."
        )
        return {}


def of_situation(situation: str) -> dict[str, Times]:
    """What is known of a situation."""
    return {**_UNWRITTEN.get(situation, {}), **stored().get(situation, {})}


def keep(situation: str, measured: Mapping[str, Sequence[float]], since: float, anew: bool = False) -> dict[str, Times]:
    """Add seconds to the file; the shortest of a step is that of all its measurements.

    Args:
        measured: seconds by what a step does; none where they cannot be measured.
        since: the time when measuring began; what another process has written later is what counts.
        anew: what was measured before that is dropped.

    Returns:
        what is known of the situation, as every later call will read it.
    """
    before, now = _UNWRITTEN.get(situation, {}), float(int(time.time()))
    try:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(FILE.with_suffix(".lock"), timeout=LOCK_SECONDS):
            everything = stored()
            merged = _merged({**before, **everything.get(situation, {})}, measured, now, since, anew)
            others = {name: everything[name] for name in everything if name != situation}
            _replace_file({**others, situation: merged})
    except Exception as error:  # a full disk, no right to write, another process that hangs
        merged = _merged(before, measured, now, since, anew)
        logger.warning_once(
            f"{str(FILE)!r} cannot be written ({in_one_line(error)}): what steps cost here is measured again by the "
            "next process."
        )
    _UNWRITTEN[situation] = merged  # also for a file that cannot be read again
    return merged


def clear() -> int:
    """Remove the file, and return of how many situations it held costs."""
    count = len(stored())
    _UNWRITTEN.clear()
    FILE.unlink(missing_ok=True)
    return count


def _merged(
    before: Mapping[str, Times], measured: Mapping[str, Sequence[float]], now: float, since: float, anew: bool
) -> dict[str, Times]:
    kept = {name: times for name, times in before.items() if not anew or times[-1] >= since}
    for name, seconds in measured.items():
        old = kept.get(name, [-math.inf])
        if old[-1] >= since:
            continue
        shortest, median, count = old[:3] if len(old) > 1 else (math.inf, 0.0, 0)
        if seconds:
            kept[name] = [min(*seconds, shortest), statistics.median(seconds), count + len(seconds), now]
        elif len(old) == 1:
            kept[name] = [now]
    return kept


def _replace_file(contents: dict[str, dict[str, Times]]) -> None:
    """Write the file as a whole or not at all."""
    handle, name = tempfile.mkstemp(dir=FILE.parent, prefix=FILE.name)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(dict([*contents.items()][-MOST_SITUATIONS:]), file, indent=1)
        os.replace(name, FILE)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(name)
        raise


def _checked(contents: Any) -> dict[str, dict[str, Times]]:
    """What a file holds, without what an earlier version wrote; a ValueError if it is something else."""
    if not isinstance(contents, dict) or not all(isinstance(times, dict) for times in contents.values()):
        raise ValueError("it holds no seconds by situation")
    found: dict[str, dict[str, Times]] = {}
    for situation, steps in contents.items():
        for name, times in steps.items():
            if type(times) is float and 0 < times < math.inf:  # of an earlier version
                continue
            numbers = isinstance(times, list) and all(type(each) in (int, float) and 0 < each < 1e12 for each in times)
            if not numbers or len(times) not in (1, 4):
                raise ValueError(f"{str(times)[:20]!r} is no measurement")
            found.setdefault(situation, {})[name] = times
    return found


def in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
