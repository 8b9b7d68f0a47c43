"""Held-out prompts: the beginnings of functions and classes in files that no model of the zoo was trained on."""

import ast
import hashlib
import json
from collections import Counter
from pathlib import Path

from .corpus import SourceFile

SHORTEST, LONGEST = 200, 400  # characters
BUNDLED = 40  # prompts in `prompts.jsonl`
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def cut_prompts(files: list[SourceFile], count: int) -> list[dict[str, str]]:
    """Cut ``count`` prompts from held-out files: files take turns, each gives its prompt of the category seen least.

    A prompt is 200 to 400 characters of whole lines, and ends after a function's or class's header or docstring,
    without the line break: the tokenizer joins a line break with the indentation that follows it, so a prompt that
    ended with one would end with a token the models rarely saw there.

    Args:
        files: the corpus; files that are not held out are passed over.
        count: how many prompts, at most as many as the files have.

    Returns:
        objects with ``id``, ``file``, ``category`` (what the prompt ends with: the header of a ``function``, ``method``
        or ``class``, or a ``docstring``) and ``prompt``.

    Raises:
        ValueError: the files hold fewer prompts.
    """
    queues = [_prompts_of(file) for file in files if file.held_out]
    chosen: list[dict[str, str]] = []
    seen: Counter[str] = Counter()
    while len(chosen) < count and any(queues):
        for queue in queues:
            if queue and len(chosen) < count:
                rarest = min(queue, key=lambda prompt: seen[prompt["category"]])
                queue.remove(rarest)
                seen[rarest["category"]] += 1
                chosen.append({"id": f"{len(chosen):02d}", **rarest})
    if len(chosen) < count:
        raise ValueError(f"{count} prompts asked for, the held-out files hold {len(chosen)}: ask for fewer.")
    return chosen


def _prompts_of(file: SourceFile) -> list[dict[str, str]]:
    """Prompts of one file that do not overlap, in an order drawn from a hash: the first may be from anywhere."""
    lines = file.text.split("\n")
    found = []
    for node, category in _definitions(ast.parse(file.text)):
        ends = [(_header_end(lines, node), category)]
        docstring_end = node.body[0].end_lineno
        if ast.get_docstring(node) is not None and docstring_end is not None:
            ends.append((docstring_end, "docstring"))
        for end, kind in ends:
            start = _first_line(lines, end)
            digest = hashlib.sha256(f"{file.name}:{node.name}:{node.lineno}:{kind}".encode()).digest()
            if start is not None:
                found.append((digest, start, end, kind))
    chosen: list[tuple[int, int, str]] = []
    for _, start, end, kind in sorted(found):
        if all(end <= other_start or start >= other_end for other_start, other_end, _ in chosen):
            chosen.append((start, end, kind))
    return [{"file": file.name, "category": kind, "prompt": "\n".join(lines[start:end])} for start, end, kind in chosen]


def _header_end(lines: list[str], node: Definition) -> int:
    """Number of lines up to the header's end; comments and blank lines may lie between it and the body's first line."""
    end = max(node.body[0].lineno - 1, node.lineno)
    while end > node.lineno and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1
    return end


def _definitions(tree: ast.Module) -> list[tuple[Definition, str]]:
    """Functions, methods and classes of a module, with their category."""
    found: list[tuple[Definition, str]] = []
    for parent in ast.walk(tree):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef):
                found.append((node, "class"))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.append((node, "method" if isinstance(parent, ast.ClassDef) else "function"))
    return found


def _first_line(lines: list[str], end: int) -> int | None:
    """Where to start so that ``lines[start:end]`` has a fitting length and begins with text; None if nowhere."""
    best = None
    for start in range(end - 1, -1, -1):
        length = sum(len(line) + 1 for line in lines[start:end]) - 1
        if length > LONGEST:
            break
        if length >= SHORTEST and lines[start].strip():
            best = start
            if not lines[start - 1].strip():  # a blank line before: a natural beginning
                break
    return best


def write_prompts(prompts: list[dict[str, str]], file: Path) -> None:
    """Write one JSON object per line."""
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
