"""Imports point one way, as the table below says: from the command line down to how a base is read."""

import ast
import inspect
import sys
import threading
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hf_drafthead
from hf_drafthead.generation import programs, step
from tests.bases import tiny_base
from tests.families import FAMILIES

PACKAGE = Path(hf_drafthead.__file__).parent

ALLOWED = {
    "bases": set(),
    "generation": {"bases"},
    # a tree is chosen by what was measured with the steps of `generation`, which asks for the choice when it is called
    "trees": {"generation", "bases"},
    "exactness": {"bases"},
    "batching": {"trees", "generation", "bases"},
    "data": set(),
    "modeling": {"exactness", "generation", "bases"},
    "cards": {"trees", "modeling", "generation"},
    "door": {"exactness", "formats", "modeling", "cards", "generation"},
    "evaluation": {"door", "exactness", "data", "trees", "modeling", "cards", "generation", "bases"},
    "training": {"data", "trees", "modeling", "cards", "generation", "bases"},
    "hub_upload": {"modeling", "cards", "generation"},
    "learning": {"training", "trees", "modeling", "generation", "bases"},
    "serving": {"evaluation"},
    "page": {"data", "evaluation", "trees", "modeling", "cards", "generation", "bases"},
    "formats": {"modeling", "cards", "generation"},
    "zoo": {"modeling", "generation"},
    "cli": {
        "exactness",
        "data",
        "zoo",
        "page",
        "serving",
        "hub_upload",
        "door",
        "formats",
        "evaluation",
        "training",
        "trees",
        "modeling",
        "cards",
        "generation",
        "bases",
    },
}
# The modules that need an extra: `page`, `serving`; `gguf`, imported once such a file is known to be there.
OF_AN_EXTRA = {
    "hf_drafthead.page.app": {"gradio"},
    "hf_drafthead.formats.gguf": {"gguf"},
    "hf_drafthead.serving.app": {"fastapi", "starlette", "uvicorn"},  # which brings starlette
    "hf_drafthead.serving.requests": {"fastapi", "pydantic", "typing-extensions"},  # which fastapi brings
    "hf_drafthead.serving.answers": {"pydantic"},
    "hf_drafthead.serving.served": {"llguidance"},  # imported where JSON is asked for, once it is known to be there
}
# What imports upward, each in a function of one line that imports when it is called: `push_to_hub`;
# `from_pretrained(convert=True)`; `init_continuous_batching` and `generate_batch`; `Manager.learn`, `learn_from`; the
# choice of a tree, by what was measured with the steps of `generation`.
LOCAL_EXCEPTIONS = {
    ("hf_drafthead.modeling.base", "hf_drafthead.hub_upload"),
    ("hf_drafthead.modeling.loading", "hf_drafthead.formats"),
    ("hf_drafthead.generation.mixin", "hf_drafthead.batching"),
    ("hf_drafthead.batching.manager", "hf_drafthead.learning"),
    ("hf_drafthead.modeling.base", "hf_drafthead.learning"),
    ("hf_drafthead.generation.settings", "hf_drafthead.trees"),
}


def imported_modules(source: str, module: str, is_package: bool) -> list[tuple[str, bool]]:
    """Every absolute name that `source` imports, and whether the import stands inside a function."""
    found = []

    def visit(node: ast.AST, local: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, local) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            parts = parts[: len(parts) - node.level + is_package] if node.level else []
            origin = ".".join([*parts, *([node.module] if node.module else [])])
            # `from hf_drafthead import zoo` imports a room by its attribute
            found.extend((f"{origin}.{alias.name}", local) for alias in node.names)
        local = local or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, local)

    visit(ast.parse(source), False)
    return found


def wrong_arrows(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports of `module` (dotted name below the package's root included) that point against the arrows."""
    room = module.split(".")[1]
    wrong = []
    for name, local in imported_modules(source, module, is_package):
        package, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if package != "hf_drafthead" or target not in ALLOWED or target == room or target in ALLOWED[room]:
            continue
        if not (local and (module, name) in LOCAL_EXCEPTIONS):
            wrong.append(f"{module} imports {name}: {room} may import {sorted(ALLOWED[room])}")
    return wrong


def modules() -> list[tuple[str, Path]]:
    files = sorted(PACKAGE.rglob("*.py"))
    return [(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts), path) for path in files]


def inside_a_room() -> list:
    outside = {"hf_drafthead.__init__", "hf_drafthead.__main__", "hf_drafthead.version"}
    return [pytest.param(name, path, id=name) for name, path in modules() if name not in outside]


def test_every_room_is_known():
    rooms = {name.split(".")[1] for name, _ in modules()} - {"__init__", "__main__", "version"}
    assert rooms <= set(ALLOWED), "give the new room its place in ALLOWED, and in CONTRIBUTING.md"


@pytest.mark.parametrize("name, path", inside_a_room())
def test_imports_follow_the_arrows(name, path):
    is_package = path.name == "__init__.py"
    module = name.removesuffix(".__init__")
    assert wrong_arrows(path.read_text(encoding="utf-8"), module, is_package) == []


@pytest.mark.parametrize(
    "module, source",
    [
        ("hf_drafthead.bases.reader", "from hf_drafthead.generation.tree import DraftTree"),
        ("hf_drafthead.generation.mixin", "from hf_drafthead.modeling.base import Drafter"),
        ("hf_drafthead.generation.mixin", "from ..modeling import base"),
        ("hf_drafthead.generation.mixin", "from hf_drafthead import modeling"),
        ("hf_drafthead.generation.mixin", "from .. import modeling"),
        ("hf_drafthead.generation.mixin", "def f():\n    import hf_drafthead.modeling.medusa"),
        ("hf_drafthead.modeling.base", "from hf_drafthead.hub_upload import push"),
        ("hf_drafthead.modeling.base", "from hf_drafthead.formats import converted"),
        ("hf_drafthead.formats.convert", "def f():\n    from hf_drafthead.evaluation import loading"),
        ("hf_drafthead.modeling.base", "class Model:\n    from ..hub_upload import push"),
        ("hf_drafthead.modeling.base", "if True:\n    from hf_drafthead.training import objectives"),
        ("hf_drafthead.modeling.base", "def f():\n    from hf_drafthead.evaluation import bench"),
        ("hf_drafthead.modeling.base", "def f():\n    from hf_drafthead.training import trainer"),
        ("hf_drafthead.modeling.base", "def f():\n    from hf_drafthead.hub_upload import push_model"),
        ("hf_drafthead.modeling.config", "def f():\n    from hf_drafthead import formats"),
        ("hf_drafthead.training.trainer", "from hf_drafthead import zoo"),
        ("hf_drafthead.trees.calibrate", "from hf_drafthead.evaluation import bench"),
        ("hf_drafthead.generation.settings", "from hf_drafthead.trees import timing"),
        ("hf_drafthead.evaluation.calls", "from hf_drafthead.training.objectives import next_token"),
        ("hf_drafthead.cards.card", "import hf_drafthead.evaluation"),
        ("hf_drafthead.zoo.chat", "from hf_drafthead.cli import main"),
    ],
)
def test_an_import_against_the_arrows_is_found(module, source):
    assert len(wrong_arrows(source, module)) == 1


@pytest.mark.parametrize(
    "module, source",
    [
        ("hf_drafthead.generation.step", "from hf_drafthead.bases.reader import BaseReader"),
        ("hf_drafthead.modeling.base", "from ..generation.mixin import DraftHeadGenerationMixin"),
        ("hf_drafthead.modeling.base", "def _hub_upload():\n    from .. import hub_upload"),
        ("hf_drafthead.modeling.loading", "def _formats():\n    from hf_drafthead import formats"),
        ("hf_drafthead.modeling.medusa", "from .base import Drafter\nimport transformers.generation"),
        ("hf_drafthead.zoo.chat", "from hf_drafthead.modeling import base"),
        ("hf_drafthead.cli", "from hf_drafthead import evaluation, zoo"),
    ],
)
def test_an_import_along_the_arrows_passes(module, source):
    assert wrong_arrows(source, module) == []


def test_a_package_resolves_its_own_relative_imports():
    assert wrong_arrows("from .tree import DraftTree", "hf_drafthead.generation", is_package=True) == []
    assert len(wrong_arrows("from ..modeling import base", "hf_drafthead.generation", is_package=True)) == 1


def test_what_the_package_imports_is_what_it_requires():
    parsed = [Requirement(line) for line in requires("hf-drafthead") or []]
    always = {canonicalize_name(one.name) for one in parsed if one.marker is None}
    distributions = packages_distributions()
    for name, path in modules():
        required = always | OF_AN_EXTRA.get(name, set())
        for imported, _ in imported_modules(path.read_text(encoding="utf-8"), name, False):
            top = imported.partition(".")[0]
            if top in sys.stdlib_module_names or top in ("", "hf_drafthead"):
                continue
            providers = {canonicalize_name(provider) for provider in distributions.get(top, [top])}
            assert providers & required, f"{name} imports {top}: add it to the dependencies in pyproject.toml"


def test_no_module_keeps_the_module_object_of_transformers():
    """A late import of transformers puts a second one into `sys.modules`, which others read from then on."""
    keeps = [
        name
        for name, path in modules()
        if any(found == "transformers" for found, _ in imported_modules(path.read_text(encoding="utf-8"), name, False))
    ]
    assert keeps == [], "import names from transformers, not the module"


def opened(call, noted=lambda: True) -> tuple[set, list[int]]:
    """The code of the package that runs in a call, in all threads, while it is to be noted: files, functions, lines."""
    codes = set()

    def note(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)) and code.co_name[0] != "<" and noted():
            codes.add(code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    lines = sum(len(inspect.getsourcelines(code)[0]) for code in codes)
    return codes, [len({code.co_filename for code in codes}), len(codes), lines]


CALL = {"max_new_tokens": 12, "eos_token_id": None, "draft_tree": [[0], [1], [0, 0]]}


def built(name):
    return next(family for family in FAMILIES if family.name == name).build(tiny_base("llama-gqa"))


@pytest.mark.parametrize(
    "name, captured, most",
    [("medusa", False, [9, 36, 425]), ("eagle", True, [10, 47, 500])],
    ids=["medusa, eager", "eagle, compiled"],
)
def test_what_a_reader_of_one_step_must_open(name, captured, most, monkeypatch):
    monkeypatch.setattr(programs, "compiled", lambda function, config: function)
    model, drafts, draft = built(name), [], step.Stages.draft
    monkeypatch.setattr(step.Stages, "draft", lambda *given: (drafts.append(0), draft(*given))[1])
    call = {"input_ids": torch.arange(3, 9)[None]} | ({"cache_implementation": "static"} if captured else {})
    codes, counts = opened(lambda: model.generate(**call, **CALL), lambda: len(drafts) == 4)
    assert len(drafts) > 4 and all(count <= limit for count, limit in zip(counts, most)), counts
    assert {"draft", "verify", "walk", "commit"} <= {code.co_name for code in codes}


@pytest.mark.parametrize(
    "shared, most", [(False, [17, 103, 1337]), (True, [23, 152, 1911])], ids=["generate", "manager"]
)
def test_what_a_reader_of_a_whole_call_must_open(shared, most):
    model, ids = built("eagle"), torch.arange(3, 9)[None]

    def request():
        manager = model.init_continuous_batching(slots=2, draft_tree=CALL["draft_tree"])
        manager.start()
        name = manager.add_request(ids[0].tolist(), max_new_tokens=12)
        assert manager.get_result(name).error is None
        manager.stop()

    call = request if shared else lambda: model.generate(ids, **CALL)
    call()
    counts = opened(call)[1]
    assert all(count <= limit for count, limit in zip(counts, most)), counts


@pytest.mark.parametrize("room, files, most", [("generation", 16, 4241), ("bases", 17, 2796)])
def test_these_rooms_are_few_modules_of_short_functions(room, files, most):
    sources = [path.read_text() for path in (PACKAGE / room).rglob("*.py")]
    functions = [
        (node.end_lineno - node.body[ast.get_docstring(node) is not None and len(node.body) > 1].lineno + 1, node.name)
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    ]
    assert max(functions) < (61,), "beside its docstring no function of these rooms has more than 60 lines"
    assert 100 < len(functions) <= 290 and len(sources) <= files
    assert sum(len(source.splitlines()) for source in sources) <= most


ROOMS = [
    ("trees", 1491),
    ("evaluation", 1632),
    ("cli", 1336),
    ("learning", 556),
    ("exactness", 758),
    ("batching", 1146),
]
ROOMS += [("serving", 922), ("cards", 524), ("data", 604), ("page", 202)]


@pytest.mark.parametrize("room, most", ROOMS)
def test_these_rooms_do_not_grow(room, most):
    assert sum(len(path.read_text().splitlines()) for path in (PACKAGE / room).rglob("*.py")) <= most


OF_CHECKPOINTS = ("loading", "base_model", "base", "files", "adapters")


def test_what_loads_saves_trains_and_publishes_checkpoints_does_not_grow():
    for files, most in (
        ([PACKAGE / "modeling" / f"{name}.py" for name in OF_CHECKPOINTS], 1556),
        ((PACKAGE / "training").glob("*.py"), 3525),
        ((PACKAGE / "hub_upload").glob("*.py"), 684),
    ):
        assert sum(len(path.read_text().splitlines()) for path in files) <= most


@pytest.mark.parametrize("name", ["mtp", "dflash", "gemma4_assistant"])
def test_a_family_is_a_short_file(name):
    assert len((PACKAGE / "modeling" / f"{name}.py").read_text().splitlines()) <= 393


def test_upward_imports_stand_in_functions_of_one_line():
    for module, target in LOCAL_EXCEPTIONS:
        tree = ast.parse(dict(modules())[module].read_text())
        name = target.rpartition(".")[2]
        bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        lines = [[ast.unparse(line) for line in body] for body in bodies]
        (body,) = [body for body in lines if f"from hf_drafthead import {name}" in body]
        assert body[1:] == [f"from hf_drafthead import {name}", f"return {name}"]


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Groups of files of which each imports every other by way of others; files that do not are in none."""
    reached = {name: set(targets) for name, targets in imports.items()}
    for middle in imports:  # Warshall's algorithm
        for name in imports:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in imports}
    return [set(group) for group in groups if group]


def imports_of_files() -> dict[str, set[str]]:
    """The files of the package that each imports, in functions too, without the two functions of one line."""
    files = {name.removesuffix(".__init__"): path for name, path in modules()}
    imports: dict[str, set[str]] = {}
    for name, path in files.items():
        names = [found for found, _ in imported_modules(path.read_text(), name, path.name == "__init__.py")]
        targets = {found if found in files else found.rpartition(".")[0] for found in names}
        imports[name] = {target for target in targets & set(files) if (name, target) not in LOCAL_EXCEPTIONS}
    return imports


def test_few_files_import_each_other():
    imports = imports_of_files()
    assert "hf_drafthead.generation.step" in imports["hf_drafthead.generation.batch"]
    groups = circles(imports)
    assert all(len(group) <= 3 for group in groups), f"these import each other: {max(groups, key=len)}"
    assert not any(
        name.startswith(("hf_drafthead.generation.", "hf_drafthead.bases.")) for group in groups for name in group
    )


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == [{"a", "b", "c"}]


def test_a_checkout_works_where_nothing_is_installed():
    asks = [path.name for path in PACKAGE.rglob("*.py") if 'version("hf-drafthead")' in path.read_text()]
    assert asks == [], f"{asks} ask for the version of the installed package: a checkout on a path has none"


@pytest.mark.parametrize("room", ["bases", "generation", "batching"])
def test_names_in_modules_of_transformers_are_taken_from_one_place(room):
    """They may move; what stands at its top does not."""
    taken = {
        (path.name, name)
        for path in (PACKAGE / room).rglob("*.py")
        for name, _ in imported_modules(path.read_text(encoding="utf-8"), f"hf_drafthead.{room}.x", False)
        if name.startswith("transformers.") and name.count(".") > 1 and not name.startswith("transformers.utils.")
    }
    assert {name for name, _ in taken} <= {"releases.py"}, sorted(taken)
