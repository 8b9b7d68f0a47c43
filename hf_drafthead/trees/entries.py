"""Entries of calibrations, and the one that was measured for calls like this one.

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
from transformers import GenerationConfig

from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.tree import DraftTree, resolve

# by drafter: what its weights were when they were hashed, and the hash
_HASHED: WeakKeyDictionary[Any, tuple[Any, str | None]] = WeakKeyDictionary()


class CalibrationKey(NamedTuple):
    """What the speed of a tree depends on, besides the text.

    device: the GPU's name, or the CPU's; threads: that torch uses on a CPU, None on a GPU; dtype: of the base;
    batch_size: rows; execution: see `Execution`; heads_hash: of the drafter's weights, see `drafter_hash`.
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
        """The key of an entry; ValueError: a field is missing, or of another type."""
        key = cls(*map(entry.get, cls._fields))  # type: ignore[arg-type]
        kinds: dict[str, Any] = {"threads": int | None, "batch_size": int, "heads_hash": str | None}
        for name, value in key._asdict().items():
            if not isinstance(value, kinds.get(name, str)) or isinstance(value, bool) or value == 0:
                raise damaged(entry, TypeError(f"its field {name!r} is {str(value)[:20]!r}"))
        return key

    @property
    def on_cpu(self) -> bool:
        """Whether the device is a CPU."""
        return self.threads is not None

    def __str__(self) -> str:
        device = f"{self.device} with {self.threads} thread(s)" if self.threads else self.device
        return f"{device}, {self.dtype}, batch size {self.batch_size}, {self.execution} steps"


def matching(entries: Sequence[dict[str, Any]], key: CalibrationKey) -> dict[str, Any] | None:
    """The entry that was measured for this key; None if there is none. ValueError: one is damaged."""
    return next((entry for entry in entries if CalibrationKey.of_entry(entry) == key), None)


def key_of_calls(model: Any, rows: int, captured: bool = False) -> CalibrationKey:
    """The key of a model's calls of so many rows, compiled or as they run by default."""
    config = GenerationConfig(cache_implementation="static" if captured else None)
    return CalibrationKey.of(model.base, model.drafter, rows, Execution.wanted(model, config).name)


def is_calibrated(model: Any, rows: int, captured: bool = False) -> bool:
    """Whether there is an entry for such calls."""
    entries = getattr(model.generation_config, "calibration", None) or []
    return bool(entries) and matching(entries, key_of_calls(model, rows, captured)) is not None


def calibrated(
    entry: dict[str, Any], max_depth: int | None, vocabulary: int
) -> tuple[DraftTree, int, dict[tuple[int, int], float], float | None]:
    """What an entry says of its calls: the tree, the root alone where none pays; how many tokens each step copies from
    the text; what steps with this tree, and with those that were timed beside it, cost in steps of the base, by nodes
    and levels; how many times as fast as the base they are. ValueError: it is damaged, or these heads cannot fill it.
    """
    paths: Any = entry.get("tree")
    copies, measured = entry.get("lookup", 0), entry.get("measured", {})
    try:
        tree: Any = resolve(DraftTree(paths), max_depth, vocabulary)
        if type(copies) is not int or copies < 0:
            raise TypeError(f"its lookup is {str(copies)[:20]!r}")
        costs = [*measured.get("costs", [])]
        if "step_cost" in measured:
            costs += [[max(tree.num_nodes, copies + 1), tree.max_depth, measured["step_cost"]]]
        for nodes, depth, cost in costs:
            is_step = type(nodes) is type(depth) is int and nodes > depth >= 0
            if not is_step or type(cost) not in (int, float) or not 0 < cost < math.inf:
                raise ValueError(f"{str([nodes, depth, cost])[:60]} is no size and cost of a step")
        speedup = measured.get("speedup")
        by_size = {(nodes, depth): float(cost) for nodes, depth, cost in costs}
        return tree, copies, by_size, speedup if type(speedup) is float else None
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise damaged(entry, error) from None


def damaged(entry: dict[str, Any], error: Exception) -> ValueError:
    """One line about an entry that cannot be used."""
    device, size = (str(entry.get(name))[:60] for name in ("device", "batch_size"))
    return ValueError(
        f"the calibration entry for {device}, batch size {size}, is damaged "
        f"({' '.join(str(error).split())[:300]}): run `hf-drafthead calibrate` again, or give draft_tree=."
    )


def merged(entries: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries with a new one, in place of the one of its key, of those of its dtype for other heads, and of damaged
    ones."""
    key = CalibrationKey.of_entry(new)

    def stays(entry: dict[str, Any]) -> bool:
        try:
            its = CalibrationKey.of_entry(entry)
        except ValueError:
            return False
        # the same heads have another hash where their values are rounded
        return key != its and (its.dtype != key.dtype or its.heads_hash == key.heads_hash)

    return [*filter(stays, entries), new]


def heads_hash(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> str:
    """The first 16 hex digits of a sha256 over names, shapes and values, these as float32: the same values give the
    same hash in any dtype. Fractions are rounded to `dtype` before, if one is given."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter)  # others are of quantizers
        plain = tensor.detach() if ordinary else tensor.detach().dequantize()
        rounded = plain.to(dtype if dtype and plain.is_floating_point() else plain.dtype)
        values = rounded.to("cpu", torch.float32).contiguous()
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]


def state_of(weights: Iterable[torch.Tensor]) -> list[Any]:
    """What is another where weights were changed: where they lie, how often they were written, and a value of each, for
    fused optimizers, and writes to `.data`, are not counted."""
    state: list[Any] = []
    for weight in weights:
        readable = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.numel() and not weight.is_meta
        value = float(weight.detach().reshape(-1)[weight.numel() // 2]) if readable else None
        state.append((weight.data_ptr(), 0 if weight.is_inference() else weight._version, value))
    return state


def drafter_hash(drafter: torch.nn.Module) -> str | None:
    """`heads_hash` of what a checkpoint holds of a drafter, kept until it changes; None where weights lie elsewhere."""
    stored = drafter.state_dict(keep_vars=True).keys()
    tensors = [*drafter.named_parameters(), *drafter.named_buffers()]
    weights = [(f"drafter.{name}", weight) for name, weight in tensors if name in stored]
    state = state_of(weight for _, weight in weights)
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
    """The model of the CPU, as the operating system names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine() or "unknown CPU"
