"""The entry of a calibration that fits a call: of this machine and execution, else the nearest as a first choice.

An entry is a JSON object of the generation config: the fields of a `CalibrationKey`, `tree` (rank paths, the most
valuable first; none where no tree pays), `lookup` (tokens that each step copies from the text, 0 where that does not
pay) and `measured` (the figures, see `calibrate`).
"""

from __future__ import annotations

import functools
import hashlib
import math
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from hf_drafthead.generation.tree import DraftTree

EXECUTIONS = ("eager", "compiled", "recorded")  # how a call runs its steps; recorded: as CUDA graphs
# by drafter: what its weights were when they were hashed, and the hash
_HASHED: WeakKeyDictionary[Any, tuple[Any, str | None]] = WeakKeyDictionary()


class CalibrationKey(NamedTuple):
    """What the speed of a tree depends on, besides the text.

    device: the GPU's name, or the CPU's; threads: that torch uses on a CPU, None on a GPU; dtype: of the base;
    batch_size: rows; execution: one of EXECUTIONS; heads_hash: of the drafter's weights, see `drafter_hash`.
    """

    device: str
    threads: int | None
    dtype: str
    batch_size: int
    execution: str
    heads_hash: str | None

    @classmethod
    def of(cls, base: Any, drafter: torch.nn.Module | None, batch_size: int, execution: str) -> CalibrationKey:
        """The key of a call; without a drafter, whose hash takes its time, that of any heads."""
        on_cpu = base.device.type == "cpu"
        device, threads = (cpu_name(), torch.get_num_threads()) if on_cpu else (device_name(base.device), None)
        dtype = str(base.dtype).removeprefix("torch.")
        heads = None if drafter is None else drafter_hash(drafter)
        return cls(device, threads, dtype, batch_size, execution, heads)

    @classmethod
    def of_entry(cls, entry: dict[str, Any]) -> CalibrationKey:
        """The key of an entry; entries of earlier versions say "cpu" for every CPU, and `captured`.

        Raises:
            ValueError: a field is missing, or of another type.
        """
        device, threads = entry.get("device"), entry.get("threads", 0 if entry.get("device") == "cpu" else None)
        execution = entry.get("execution")
        if execution is None and isinstance(entry.get("captured"), bool):
            # on a GPU every call that was not compiled was recorded
            execution = "compiled" if entry["captured"] else "eager" if device == "cpu" else "recorded"
        key = cls(device, threads, entry.get("dtype"), entry.get("batch_size"), execution, entry.get("heads_hash"))  # type: ignore[arg-type]
        for name, value in key._asdict().items():
            kinds: Any = {"threads": int | None, "batch_size": int, "heads_hash": str | None}.get(name, str)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise damaged(entry, TypeError(f"its field {name!r} is {str(value)[:20]!r}"))
        if key.batch_size < 1 or key.execution not in EXECUTIONS:
            raise damaged(entry, ValueError(f"batch size {key.batch_size}, execution {key.execution[:20]!r}"))
        return key

    @property
    def on_cpu(self) -> bool:
        """Whether the device is a CPU."""
        return self.threads is not None

    def __str__(self) -> str:
        device = f"{self.device} with {self.threads} thread(s)" if self.threads else self.device
        return f"{device}, {self.dtype}, batch size {self.batch_size}, {self.execution} steps"


def matching(entries: Sequence[dict[str, Any]], key: CalibrationKey) -> dict[str, Any] | None:
    """The entry that was measured for this key; None if there is none.

    Raises:
        ValueError: an entry is damaged.
    """
    return next((entry for entry in entries if CalibrationKey.of_entry(entry) == key), None)


def is_calibrated(model: Any, rows: int, captured: bool = False) -> bool:
    """Whether there is an entry for calls of a model on this machine, of so many rows, compiled or not."""
    entries = getattr(model.generation_config, "calibration", None) or []
    graphs = model.base.device.type == "cuda"
    execution = "compiled" if captured else "recorded" if graphs else "eager"
    return (
        bool(entries) and matching(entries, CalibrationKey.of(model.base, model.drafter, rows, execution)) is not None
    )


def nearest(entries: Sequence[dict[str, Any]], key: CalibrationKey) -> dict[str, Any] | None:
    """The entry of these heads that is a first choice for a key; None if there is none.

    The same kind of device comes first, then the nearest batch size, the execution, the dtype, the device, its threads,
    and fewer nodes. A GPU's entry is none for a CPU, and the other way round. That no tree pays for some rows says
    nothing about fewer.

    Raises:
        ValueError: an entry is damaged.
    """
    candidates = []
    for entry in entries:
        its, paths = CalibrationKey.of_entry(entry), entry.get("tree")
        # in another dtype the same weights are rounded, and have another hash
        other_heads = None not in (its.heads_hash, key.heads_hash) and its.heads_hash != key.heads_hash
        if (its.dtype == key.dtype and other_heads) or its.on_cpu != key.on_cpu:
            continue
        if not paths and its.batch_size > key.batch_size:
            continue
        rows = abs(math.log(its.batch_size / key.batch_size))
        differs = (its.execution != key.execution, its.dtype != key.dtype, its.device != key.device)
        threads = abs((its.threads or 0) - (key.threads or 0))
        candidates.append(((rows, *differs, threads, len(paths or [])), entry))
    return min(candidates, key=lambda pair: pair[0])[1] if candidates else None


def tree_of(
    entry: dict[str, Any], max_depth: int | None, vocabulary: int, key: CalibrationKey | None = None
) -> DraftTree:
    """The tree of an entry; without paths it is the root alone.

    Args:
        entry: of a calibration.
        max_depth, vocabulary: see `resolve`.
        key: of a call; with more rows than were measured, a smaller tree, so that a step verifies as many tokens.

    Raises:
        ValueError: the entry holds none, or one that these heads cannot fill.
    """
    try:
        paths = entry.get("tree")
        if not isinstance(paths, list):
            raise TypeError(f"its tree is of type {type(paths).__name__}, expected a list of rank paths.")
        if not paths:
            return DraftTree.root_alone()
        tree = DraftTree.resolve(paths, max_depth, vocabulary)
        measured = CalibrationKey.of_entry(entry).batch_size if key is not None else 0
        if key is None or measured >= key.batch_size:
            return tree
        # every beginning of the paths is a tree
        return DraftTree(paths[: max(tree.num_nodes * measured // key.batch_size, 2) - 1])
    except (TypeError, ValueError) as error:
        raise damaged(entry, error) from None


def copies_of(entry: dict[str, Any]) -> int:
    """Tokens that each step copies from the text; an entry of an earlier version says nothing, and copies none.

    Raises:
        ValueError: the entry holds something else.
    """
    copies = entry.get("lookup", 0)
    if isinstance(copies, bool) or not isinstance(copies, int) or copies < 0:
        raise damaged(entry, TypeError(f"its lookup is {str(copies)[:20]!r}"))
    return copies


def expected_of(entry: dict[str, Any]) -> tuple[float, float]:
    """What a step with the entry's tree costs in steps of the base, and the tokens that it emits.

    Raises:
        ValueError: the entry does not hold both.
    """
    try:
        measured = entry["measured"]
        if "step_cost" not in measured:  # of an earlier version
            measured = {**measured, "step_cost": measured["tree_seconds"] / measured["base_step_seconds"]}
        cost, tokens = (float(measured[name]) for name in ("step_cost", "tokens_per_step"))
        if not (0 < cost < math.inf and 0 < tokens < math.inf):
            raise ValueError(f"a step of {tokens} tokens that costs {cost} was never measured")
        return cost, tokens
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise damaged(entry, error) from None


def gain_of(entry: dict[str, Any]) -> str:
    """How many times as fast the entry's tree was, as far as it says so, for the end of a sentence."""
    measured = entry.get("measured")
    speedup, interval = ((measured or {}).get(name) for name in ("speedup", "interval"))
    between = f" ({interval[0]:.2f} to {interval[1]:.2f})" if isinstance(interval, list) and len(interval) == 2 else ""
    return f", {speedup:.2f} times as fast as the base{between}" if isinstance(speedup, float) else ""


def tokens_of(entry: dict[str, Any], nodes: int) -> float | None:
    """Tokens of a step with so many nodes, as far as an entry knows: of its own tree, or of the best that was timed."""
    measured = entry.get("measured")
    if not isinstance(measured, dict):
        return None
    timed = measured.get("candidates")
    rows = [row[0:3:2] for row in (timed if isinstance(timed, list) else []) if isinstance(row, list) and len(row) > 2]
    pairs = [*rows, [len(entry["tree"]) + 1, measured.get("tokens_per_step")]]
    numbers = [pair for pair in pairs if all(type(value) in (int, float) and 0 < value < math.inf for value in pair)]
    of_own = [tokens for size, tokens in numbers[-1:] if size == nodes]
    return max(of_own or [tokens for size, tokens in numbers if size <= nodes], default=None)


def damaged(entry: dict[str, Any], error: Exception) -> ValueError:
    """One line about an entry that cannot be used."""
    device, size = (str(entry.get(name))[:60] for name in ("device", "batch_size"))
    return ValueError(
        f"the calibration entry for {device}, batch size {size}, is damaged "
        f"({' '.join(str(error).split())[:300]}): run `hf-drafthead calibrate` again, or give draft_tree=."
    )


def heads_hash(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> str:
    """The first 16 hex digits of a sha256 over names, shapes and values, these as float32.

    The same values therefore give the same hash in any dtype.

    Args:
        tensors: name and tensor, in any order.
        dtype: the type that fractions are rounded to before; None leaves them as they are.

    >>> weight = torch.tensor([1.0, 2.5])
    >>> heads_hash([("a", weight)]) == heads_hash([("a", weight.bfloat16())])
    True
    >>> heads_hash([("a", weight)]) == heads_hash([("b", weight)])
    False
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter)  # others are of quantizers
        plain = tensor.detach() if ordinary else tensor.detach().dequantize()
        rounded = plain.to(dtype if dtype and plain.is_floating_point() else plain.dtype)
        values = rounded.to("cpu", torch.float32).contiguous()
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]


def drafter_hash(drafter: torch.nn.Module) -> str | None:
    """`heads_hash` of what a checkpoint holds of a drafter, kept until it changes; None where weights lie elsewhere."""
    stored = drafter.state_dict(keep_vars=True).keys()
    tensors = [*drafter.named_parameters(), *drafter.named_buffers()]
    weights = [(f"drafter.{name}", weight) for name, weight in tensors if name in stored]
    state = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for _, weight in weights]
    hashed = _HASHED.get(drafter)
    if hashed is None or hashed[0] != state:
        elsewhere = any(weight.is_meta for _, weight in weights)
        hashed = _HASHED[drafter] = state, None if elsewhere else heads_hash(weights)
    return hashed[1]


def device_name(device: torch.device) -> str:
    """The GPU's name, or the device's type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@functools.cache
def cpu_name() -> str:
    """The model of the CPU, as the operating system names it.

    >>> len(cpu_name()) > 0 and cpu_name() != "cpu"
    True
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine() or "unknown CPU"


def merged(entries: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries with a new one, in place of the one of its key and of those of its dtype for other heads.

    Entries of earlier versions that it stands for go as well, and damaged ones.
    """
    key = CalibrationKey.of_entry(new)

    def stays(entry: dict[str, Any]) -> bool:
        try:
            its = CalibrationKey.of_entry(entry)
        except ValueError:
            return False
        if its.dtype != key.dtype:  # the same heads have another hash where their values are rounded
            return True
        if its.device == "cpu" and key.on_cpu:
            its = its._replace(device=key.device, threads=key.threads)
        return its.heads_hash == key.heads_hash and its != key

    return [*filter(stays, entries), new]
