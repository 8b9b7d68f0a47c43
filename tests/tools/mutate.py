"""Which small changes of the code does no test notice? Mutants of the walks, the rules, the tree and the cache.

    python tests/tools/mutate.py                                   # all of them (`make mutate`)
    python tests/tools/mutate.py acceptance --only walk_on_device  # of one module, with this in their names

A mutant differs from the code in one place: a comparison, an operator, a number, a truth value or a condition. Texts,
asserts and type hints are left as they are. A process is forked for each of the mutants: it puts the mutant's functions
into place and runs the tests of `TESTS` that have come through the line, those first that found other mutants of that
function. A mutant that no test notices has survived. Each is explained in SURVIVORS.md, by the name that is printed
here; one that is not, or one that is explained there and does not survive, is exit code 1.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import importlib
import inspect
import json
import os
import pickle
import resource
import sys
import tempfile
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings

ROOT = Path(__file__).parents[2]
ROOMS = {  # of each module
    **dict.fromkeys(("acceptance", "rules", "tree"), "generation"),
    **dict.fromkeys(("topology", "slots", "errors"), "bases"),
}
TESTS = ("test_walks.py", "test_slots.py", "test_rules.py", "test_tree.py", "test_typical.py")
LONGEST_TEST = 1.0  # seconds of the processor; tests that take longer are left out
ALLOWED_SECONDS = 30  # of the processor for one mutant, beyond three times what its tests take
ALLOWED_MEMORY = 16 * 2**30  # bytes of addresses
# Nodes that say little by themselves: a changed number is shown with what stands around them.
OF_A_PIECE = (ast.Constant, ast.Slice, ast.Tuple, ast.keyword, ast.UnaryOp, ast.arguments)
EXPLAINED = Path(__file__).with_name("SURVIVORS.md")

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass
class Mutant:
    """One change: where it stands, its name, and the module's source with it.

    lines: of the statement, whose tests are asked; None where it runs before any test, and all of them are.
    """

    module: str
    scope: str
    name: str
    lines: range | None
    source: str


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node, one change each."""
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in SWAPPED:
        yield with_fields(node, op=SWAPPED[type(node.op)]())
    elif isinstance(node, ast.Compare):
        for place, op in enumerate(node.ops):
            yield with_fields(node, ops=[*node.ops[:place], SWAPPED[type(op)](), *node.ops[place + 1 :]])
    elif isinstance(node, ast.UnaryOp):
        if not isinstance(node.operand, ast.Constant):  # a negative number is changed as a number
            yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        if not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):  # which are changed by themselves
            yield with_fields(node, test=ast.UnaryOp(ast.Not(), node.test))


def with_fields(node: Any, **fields: Any) -> Any:
    """A copy of a node with other fields."""
    found = copy.copy(node)
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def left_alone(node: ast.AST) -> set[str]:
    """Fields of a node in which nothing is changed: type hints, and what only messages consist of."""
    if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)):
        return set(node._fields)
    return {"annotation", "returns", "decorator_list", "bases", "keywords" if isinstance(node, ast.ClassDef) else ""}


def file_of(module: str) -> Path:
    """Where a module stands."""
    return ROOT / "hf_drafthead" / ROOMS[module] / f"{module}.py"


def mutants(module: str) -> Iterator[Mutant]:
    """All of a module, in the order of its lines."""
    tree = ast.parse(file_of(module).read_text(encoding="utf-8"))
    names: Counter[str] = Counter()

    def visit(node: ast.AST, scope: str, lines: range | None, shown: ast.AST) -> Iterator[Mutant]:
        """Changes of what stands below a node, whose scope and lines are given, and the code by which one is shown."""
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            scope = f"{scope}.{node.name}"
        if isinstance(node, ast.FunctionDef):
            lines = range(node.lineno, (node.end_lineno or 0) + 1)
        shown = shown if isinstance(node, OF_A_PIECE) else node
        for field, value in ast.iter_fields(node):
            if field in left_alone(node):
                continue
            for place, child in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(child, ast.AST):
                    continue
                here = lines_of(child) if lines and isinstance(child, ast.stmt) else lines
                for other in changed(child):
                    alone = not isinstance(child, ast.Constant)
                    before = first_line(child if alone else shown)
                    put(node, field, place, other)
                    name = f"{scope}: {before} -> {first_line(other if alone else shown)}"
                    names[name] += 1
                    name += f" ({names[name]})" if names[name] > 1 else ""
                    yield Mutant(module, scope, name, here, ast.unparse(tree))
                    put(node, field, place, child)
                yield from visit(child, scope, here, shown)

    yield from visit(tree, module, None, tree)


def put(node: ast.AST, field: str, place: int, child: ast.AST) -> None:
    """Set a child of a node, which may be one of a list."""
    value = getattr(node, field)
    if isinstance(value, list):
        value[place] = child
    else:
        setattr(node, field, child)


def first_line(node: ast.AST) -> str:
    """The code of a node without what hangs below a compound statement."""
    if hasattr(node, "body") and isinstance(node.body, list):
        node = with_fields(node, body=[ast.Pass()], orelse=[], decorator_list=[])
    return ast.unparse(node).partition("\n")[0]


def lines_of(statement: Any) -> range:
    """The lines of a statement; of a compound one those before its body."""
    last = statement.body[0].lineno if hasattr(statement, "body") else statement.end_lineno + 1
    return range(statement.lineno, max(last, statement.lineno + 1))


def install(mutant: Mutant) -> None:
    """Give the module's own functions the mutant's code, so that everyone who has imported them runs it."""
    original = importlib.import_module(f"hf_drafthead.{ROOMS[mutant.module]}.{mutant.module}")
    made = types.ModuleType(original.__name__)
    made.__package__ = original.__package__
    sys.modules[made.__name__] = made  # where dataclasses look for their types
    try:
        exec(compile(mutant.source, str(original.__file__), "exec"), made.__dict__)
    finally:
        sys.modules[made.__name__] = original
    ours = [module for name, module in sys.modules.items() if name.startswith("hf_drafthead")]
    for name, value in vars(made).items():
        mine = vars(original).get(name)
        if inspect.isclass(value) and value.__module__ == original.__name__:
            for attribute, inner in vars(value).items():
                if type(inner) in (bool, int, float):
                    setattr(mine, attribute, inner)
                else:
                    exchange(vars(mine).get(attribute), inner)
        elif not name.startswith("__") and not callable(value) and value != mine:
            for module in ours:
                if name in vars(module) and vars(module)[name] is mine:
                    setattr(module, name, value)
        else:
            exchange(mine, value)


def exchange(mine: Any, made: Any) -> None:
    """Give a function the code and the defaults of the mutant's."""
    mine, made = inner_function(mine), inner_function(made)
    if isinstance(mine, types.FunctionType) and isinstance(made, types.FunctionType) and mine is not made:
        mine.__code__, mine.__defaults__, mine.__kwdefaults__ = made.__code__, made.__defaults__, made.__kwdefaults__


def inner_function(thing: Any) -> Any:
    """The function behind a method, a property or a cache."""
    for name in ("__func__", "fget", "func", "__wrapped__"):
        thing = getattr(thing, name, None) or thing
    return thing


@dataclass
class Noted:
    """What is known of the tests: seconds of each, and the tests that have come through a line."""

    seconds: dict[str, float]
    through: dict[tuple[str, int], set[str]]


class Runs:
    """A plugin of pytest: in the place of its loop over the tests, one over the mutants.

    Args:
        chosen: the mutants.
        report: is told of each whether it was noticed, and by which test.
    """

    def __init__(self, chosen: list[Mutant], report: Callable[[Mutant, str | None], None]):
        self.chosen, self.report = chosen, report

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        noted: Noted = forked(lambda: observed(items))
        kept = [name for name, seconds in noted.seconds.items() if seconds <= LONGEST_TEST]
        total = sum(noted.seconds[name] for name in kept)
        print(f"{len(kept)} of {len(items)} tests, which take {total:.0f} s", flush=True)
        finders: dict[str, Counter[str]] = defaultdict(Counter)
        for mutant in self.chosen:
            asked = set(kept)
            if mutant.lines is not None:
                asked &= set().union(*(noted.through.get((mutant.module, line), set()) for line in mutant.lines))
            known = finders[mutant.scope]
            order = sorted(asked, key=lambda name, known=known: (-known[name], noted.seconds[name]))
            allowed = ALLOWED_SECONDS + 3 * sum(noted.seconds[name] for name in order)
            work = functools.partial(first_to_fail, mutant, [items[name] for name in order], allowed)
            finder = forked(work, lost="its end")
            known.update([finder] if finder else [])
            self.report(mutant, finder)
        return True


def forked(work: Callable[[], Any], lost: Any = None) -> Any:
    """What a function returns in a process of its own, from which nothing else comes back; `lost` if it is ended."""
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if not child:
            try:
                pickle.dump(work(), file)
                file.flush()
                os._exit(0)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if status and lost is None:
            raise RuntimeError("the tests could not be run without a mutant")
        file.seek(0)
        return pickle.load(file) if not status else lost


def failed(item: pytest.Item, following: pytest.Item | None) -> bool:
    """Whether a test fails, in any of its phases."""
    return any(report.failed for report in runtestprotocol(item, nextitem=following, log=False))


def observed(items: dict[str, pytest.Item]) -> Noted:
    """Run every test by itself, as it is."""
    files = {str(file_of(module)): module for module in ROOMS}
    noted = Noted({}, defaultdict(set))
    now = ""

    def enter(frame, event, argument):
        return note if frame.f_code.co_filename in files else None

    def note(frame, event, argument):
        if event == "line":
            noted.through[files[frame.f_code.co_filename], frame.f_lineno].add(now)
        return note

    order = list(items.values())
    for item, following in zip(order, [*order[1:], None]):
        now, start = item.nodeid, time.process_time()
        sys.settrace(enter)
        spoilt = failed(item, following)
        sys.settrace(None)
        noted.seconds[now] = time.process_time() - start
        if spoilt:
            raise RuntimeError(f"{now} fails without a mutant")
    return noted


def first_to_fail(mutant: Mutant, items: list[pytest.Item], allowed: float) -> str | None:
    """The test that notices a mutant, or None."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + allowed), resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_AS, (ALLOWED_MEMORY, resource.RLIM_INFINITY))
    try:
        install(mutant)
    except Exception as error:  # not even the module can be imported
        return type(error).__name__
    for item, following in zip(items, [*items[1:], None]):
        if failed(item, following):
            return item.nodeid
    return None


def explained() -> set[str]:
    """The names of the mutants that SURVIVORS.md speaks of."""
    lines = EXPLAINED.read_text(encoding="utf-8").splitlines()
    return {line.removeprefix("- `").removesuffix("`") for line in lines if line.startswith("- `")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help=f"default: {' '.join(ROOMS)}")
    parser.add_argument("--only", default="", help="a part of the mutants' names")
    parser.add_argument("--survivors", action="store_true", help="those of SURVIVORS.md alone")
    parser.add_argument("--json", type=Path, help="what was found of each")
    arguments = parser.parse_args()
    known = explained()
    every = [mutant for module in arguments.modules or ROOMS for mutant in mutants(module)]
    chosen = [mutant for mutant in every if arguments.only in mutant.name]
    if arguments.survivors:
        chosen = [mutant for mutant in chosen if mutant.name in known]
    found: dict[str, str | None] = {}

    def report(mutant: Mutant, finder: str | None) -> None:
        found[mutant.name] = finder
        if finder is None:
            print(f"survived: {mutant.name}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")

    # Every run of a test tries the same, none fails because the machine is busy, and no smaller example is looked for.
    hypothesis_settings.register_profile(
        "mutants",
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    hypothesis_settings.load_profile("mutants")
    tests = [str(ROOT / "tests" / "generation" / name) for name in TESTS]
    sys.path.insert(0, str(ROOT))
    pytest.main(
        ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:logging", "-s", *tests], plugins=[Runs(chosen, report)]
    )
    survived = {name for name, finder in found.items() if finder is None}
    print(f"{len(found)} mutants, {len(survived)} survived, {len(survived - known)} of them without an explanation")
    stale = (known & set(found)) - survived
    if not (arguments.modules or arguments.only):
        stale = known - survived
    for name in sorted(stale):
        print(f"explained, but does not survive: {name}")
    sys.exit(1 if survived - known or stale or len(found) < len(chosen) else 0)


if __name__ == "__main__":
    main()
