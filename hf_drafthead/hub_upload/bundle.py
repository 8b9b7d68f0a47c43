"""The package's model code as one file, for places where only transformers and torch are installed.

transformers fetches that file from beside the weights when it is told `trust_remote_code=True`. It holds the modules
that a family needs, one behind the other in the order in which they need each other: imports between them fall away,
all others stand once at the top, and the published trees are in it as data.
"""

import ast
import json
import re
from dataclasses import dataclass, field
from importlib import metadata, resources
from pathlib import Path

from hf_drafthead.generation import tree as tree_module
from hf_drafthead.generation.tree import DraftTree, published_trees
from hf_drafthead.modeling import MODEL_CLASSES, DraftHeadPreTrainedModel

PACKAGE = "hf_drafthead"
ROOMS = ("hf_drafthead.generation.", "hf_drafthead.modeling.")
FILE = "modeling_drafthead.py"
PREFIX = "drafthead_"  # of every family's model_type

HEADER = '''\
# Made from hf_drafthead {version}, which holds the same code module by module, with its tests and documentation.
# Where that package is imported, its own classes are used instead of these.
"""A base model with {family} heads, whose `generate` returns the base's own text in fewer forward passes."""

from __future__ import annotations

{imports}

__version__ = "{version}"
'''

# Takes the place of the function in generation/tree.py that looks into the package's folder.
TREE_FILES = '''\
# Rank paths of the published trees.
PUBLISHED_TREES = {
@TREES@
}


class _TreeFile(str):
    """A published tree: as much of a file as is asked of one."""

    name = ""

    def read_text(self) -> str:
        return str(self)


class _TreeFiles(dict):
    """The published trees by the names of their files: as much of a folder as is asked of one."""

    def iterdir(self):
        return iter(self.values())

    def __truediv__(self, name):
        return self[name]


def _tree_files():
    files = _TreeFiles()
    for name, paths in PUBLISHED_TREES.items():
        file = _TreeFile(json.dumps({"paths": paths}))
        file.name = f"{name}.json"
        files[file.name] = file
    return files
'''

# Takes the place of an import, inside a function, of what only the package has.
ABSENT = """\
try:
    {statement}
except ImportError as error:
    raise ImportError("hf_drafthead is not installed, and only its model code is here: install it.") from error"""


@dataclass
class Module:
    """One module of the package, as it goes into the file.

    text: without its imports; imports: statement that binds a name, by the name; defines: text that defines a name, by
    the name; needs: modules to be put before it; uses: modules that its functions import.
    """

    name: str
    text: str = ""
    imports: dict[str, str] = field(default_factory=dict)
    defines: dict[str, str] = field(default_factory=dict)
    needs: list[str] = field(default_factory=list)
    uses: list[str] = field(default_factory=list)


def add_bundle(folder: Path) -> None:
    """Write the model code of a checkpoint into its folder, and into its config.json where transformers finds it.

    Args:
        folder: of a draft-head checkpoint.

    Raises:
        OSError: there is no config.json.
        ValueError: it belongs to another kind of model.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise OSError(f"{str(folder)!r} holds no config.json: give the folder of a draft-head checkpoint.")
    config = json.loads(path.read_text(encoding="utf-8"))
    family = str(config.get("model_type")).removeprefix(PREFIX)
    code = build_bundle(family)
    model_class = families()[family]
    stem = Path(FILE).stem
    config["auto_map"] = {
        "AutoConfig": f"{stem}.{model_class.config_class.__name__}",
        "AutoModel": f"{stem}.{model_class.__name__}",
        "AutoModelForCausalLM": f"{stem}.{model_class.__name__}",
    }
    (Path(folder) / FILE).write_text(code, encoding="utf-8")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def build_bundle(family: str) -> str:
    """The model code of a family as the text of one Python file; the same package gives the same text.

    Args:
        family: `medusa`, `hydra`, ..., as in the `model_type` of its config.

    Raises:
        ValueError: there is no such family, or two of its modules cannot stand in one file.
    """
    if family not in families():
        raise ValueError(f"there is no family {family!r}: expected one of {', '.join(sorted(families()))}.")
    modules = in_order(families()[family].__module__)
    check_names(modules)
    statements = {statement for module in modules for statement in module.imports.values()}
    plain = sorted(statement for statement in statements if statement.startswith("import "))
    header = HEADER.format(
        family=family,
        version=metadata.version("hf-drafthead"),
        imports="\n".join([*plain, *sorted(statements - set(plain))]),
    )
    parts = [f"# ---- {module.name.replace('.', '/')}.py\n\n{module.text}" for module in modules]
    return "\n\n".join([header.strip(), *parts]) + "\n"


def families() -> dict[str, type[DraftHeadPreTrainedModel]]:
    """The model class of every family, by the name in its `model_type`."""
    return {one.config_class.model_type.removeprefix(PREFIX): one for one in MODEL_CLASSES}


def in_order(name: str) -> list[Module]:
    """The module of that name behind all others that it needs, and those that their functions import at the end."""
    found: dict[str, Module | None] = {}  # None while what it needs is still being put before it

    def put(one: str) -> None:
        if one in found:
            if found[one] is None:
                raise ValueError(f"{one} and another module import each other: move what both need into a third.")
            return
        found[one] = None
        module = read_module(one)
        for needed in module.needs:
            put(needed)
        del found[one]  # to be put in behind those
        found[one] = module

    put(name)
    while later := [one for module in found.values() if module for one in module.uses if one not in found]:
        put(later[0])
    return [module for module in found.values() if module is not None]


def read_module(name: str) -> Module:
    """A module's text, with its imports taken out.

    Raises:
        ValueError: it imports something of the package in a way that one file cannot follow.
    """
    *rooms, stem = name.split(".")[1:]
    source = resources.files(PACKAGE).joinpath(*rooms, f"{stem}.py").read_text(encoding="utf-8")
    module, lines = Module(name), source.splitlines()
    replaced: dict[int, tuple[int, str]] = {}  # first line: last line, and what comes in their place
    tree = ast.parse(source)
    for node in tree.body:
        inside = node.body if is_type_checking(node) else [node]
        if all(isinstance(one, (ast.Import, ast.ImportFrom)) for one in inside):
            # what only annotations need is there as well: they are never evaluated before all modules are
            for one in inside:
                take_import(module, one, needed=inside == [node])
            replaced[node.lineno] = node.end_lineno or node.lineno, ""
            continue
        for defined in names_defined(node):
            module.defines[defined] = ast.unparse(node)
        if module.name == tree_module.__name__ and getattr(node, "name", "") == "_tree_files":
            replaced[node.lineno] = node.end_lineno or node.lineno, tree_data()
            continue
        for one in ast.walk(node):
            if isinstance(one, (ast.Import, ast.ImportFrom)) and (text := local_import(module, one)) is not None:
                indent = " " * one.col_offset
                text = "\n".join(indent + line for line in text.splitlines())
                replaced[one.lineno] = one.end_lineno or one.lineno, text
    for first in sorted(replaced, reverse=True):
        last, text = replaced[first]
        lines[first - 1 : last] = [text] if text else []
    module.text = re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip()
    return module


def take_import(module: Module, node: ast.AST, needed: bool) -> None:
    """Note one import of a module's top level."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.partition(".")[0] == PACKAGE:
                raise unfollowable(module, node)
            bound = alias.asname or alias.name.partition(".")[0]
            module.imports[bound] = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
    elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
        origin = origin_of(module, node)
        for alias in node.names:
            if not origin.startswith(PACKAGE):
                renamed = f" as {alias.asname}" if alias.asname else ""
                module.imports[alias.asname or alias.name] = f"from {origin} import {alias.name}{renamed}"
            elif alias.asname or not is_module(origin):
                raise unfollowable(module, node)
        if origin.startswith(PACKAGE) and needed and origin not in module.needs:
            module.needs.append(origin)


def local_import(module: Module, node: ast.Import | ast.ImportFrom) -> str | None:
    """What takes the place of an import inside a function; None for one that can stay."""
    if isinstance(node, ast.Import):
        if any(alias.name.partition(".")[0] == PACKAGE for alias in node.names):
            raise unfollowable(module, node)
        return None
    origin = origin_of(module, node)
    if origin.partition(".")[0] != PACKAGE:
        return None
    if not (origin.startswith(ROOMS) and is_module(origin)):
        whole = ast.ImportFrom(module=origin, names=node.names, level=0)
        return ABSENT.format(statement=ast.unparse(whole))
    if any(alias.asname for alias in node.names):
        raise unfollowable(module, node)
    module.uses.append(origin)
    return f"pass  # {', '.join(alias.name for alias in node.names)}: in this file"


def origin_of(module: Module, node: ast.ImportFrom) -> str:
    """The absolute name of what a `from` import names."""
    above = module.name.split(".")[: -node.level] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def is_module(name: str) -> bool:
    """Whether a name of the package is a file and no folder."""
    *rooms, stem = name.split(".")[1:] or [""]
    return resources.files(PACKAGE).joinpath(*rooms, f"{stem}.py").is_file()


def unfollowable(module: Module, node: ast.Import | ast.ImportFrom) -> ValueError:
    """The refusal of an import that would bind something else than a name of one module by that name."""
    return ValueError(
        f"{module.name} has `{ast.unparse(node)}`, which one file cannot follow: import the names that are needed from "
        "the module that defines them, without renaming."
    )


def is_type_checking(node: ast.AST) -> bool:
    """Whether it is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def names_defined(node: ast.stmt) -> list[str]:
    """The names that a statement of a module's top level binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]


def check_names(modules: list[Module]) -> None:
    """Refuse modules that mean different things by one name.

    Raises:
        ValueError: there is such a name.
    """
    meanings: dict[str, tuple[str, str]] = {}
    for module in modules:
        for name, meaning in [*module.imports.items(), *module.defines.items()]:
            other, known = meanings.setdefault(name, (module.name, meaning))
            if known != meaning:
                raise ValueError(
                    f"{other} and {module.name} mean different things by {name!r}, and cannot stand in one file: rename "
                    "it in one of them."
                )


def tree_data() -> str:
    """The published trees, and the function that finds them."""
    trees = {name: [list(path) for path in DraftTree.from_name(name).paths] for name in published_trees()}
    return TREE_FILES.replace("@TREES@", "\n".join(f'    "{name}": {paths},' for name, paths in trees.items()))
