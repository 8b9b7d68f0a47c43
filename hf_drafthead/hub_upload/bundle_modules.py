"""Modules of the package as text for one file: without their imports, each after the modules that it imports."""

import ast
import re
import symtable
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "hf_drafthead"
PACKAGE_FOLDER = Path(__file__).parents[1]
ROOMS = ("hf_drafthead.generation.", "hf_drafthead.modeling.")

# Takes the place of an import, inside a function, of what only the package has.
ABSENT = """\
try:
    {statement}
except ImportError as error:
    raise ImportError("hf_drafthead is not installed, and only its model code is here: install it.") from error"""


@dataclass
class Module:
    """One module of the package, as it goes into the file.

    text: without its imports; imports: the statement that binds a name, by the name; defines: the code that defines a
    name, by the name; needs: modules that have to stand before it; uses: modules that its functions import.
    """

    name: str
    text: str = ""
    imports: dict[str, str] = field(default_factory=dict)
    defines: dict[str, str] = field(default_factory=dict)
    needs: list[str] = field(default_factory=list)
    uses: list[str] = field(default_factory=list)


def in_order(name: str) -> list[Module]:
    """A module after all others that it imports; modules that only functions import come last."""
    found: dict[str, Module] = {}
    begun: set[str] = set()

    def put(one: str) -> None:
        if one in found:
            return
        if one in begun:
            raise ValueError(f"{one} and another module import each other: move what both need into a third.")
        begun.add(one)
        module = read_module(one)
        for needed in module.needs:
            put(needed)
        found[one] = module

    put(name)
    while later := [one for module in found.values() for one in module.uses if one not in found]:
        put(later[0])
    return list(found.values())


def read_module(name: str) -> Module:
    """A module's text without its imports, and what these and its definitions bind."""
    source = file_of(name).read_text(encoding="utf-8")
    module, lines = Module(name), source.splitlines()
    replaced: dict[int, tuple[int, str]] = {}  # first line: last line, and what comes in their place
    for node in ast.parse(source).body:
        first = min(one.lineno for one in [node, *getattr(node, "decorator_list", [])])
        last = node.end_lineno or first
        # What is only imported for annotations binds the same names, but nothing has to stand before the module for it.
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        inside = node.body if isinstance(node, ast.If) and for_types else [node]
        imports = [one for one in inside if isinstance(one, (ast.Import, ast.ImportFrom))]
        if len(imports) == len(inside):
            for imported in imports:
                take_import(module, imported, needed=not for_types)
            replaced[first] = last, ""
            continue
        module.defines |= dict.fromkeys(names_defined(node), ast.unparse(node))
        for one in ast.walk(node):
            if isinstance(one, (ast.Import, ast.ImportFrom)) and (text := local_import(module, one)) is not None:
                indent = " " * one.col_offset
                replaced[one.lineno] = one.end_lineno or one.lineno, "\n".join(indent + s for s in text.splitlines())
    for first in sorted(replaced, reverse=True):
        last, text = replaced[first]
        lines[first - 1 : last] = [text] if text else []
    module.text = re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip()
    return module


def check_names(modules: list[Module]) -> None:
    """Refuse modules that use one name for different things."""
    meanings: dict[str, tuple[str, str]] = {}
    for module in modules:
        for name, meaning in [*module.imports.items(), *module.defines.items()]:
            other, known = meanings.setdefault(name, (module.name, meaning))
            if known != meaning:
                raise ValueError(
                    f"{other} and {module.name} use the name {name!r} for different things and cannot share one file: "
                    "rename it in one of them."
                )


def take_import(module: Module, node: ast.Import | ast.ImportFrom, needed: bool) -> None:
    """Note an import of a module's top level."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.partition(".")[0] == PACKAGE:
                raise unfollowable(module, node)
            bound = alias.asname or alias.name.partition(".")[0]
            # `import torch` and `import torch.nn` bind the same name, and both are wanted
            key = bound if alias.asname else alias.name
            module.imports[key] = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
        return
    origin = origin_of(module, node)
    if origin == "__future__":
        return
    if origin.partition(".")[0] != PACKAGE:
        for alias in node.names:
            renamed = f" as {alias.asname}" if alias.asname else ""
            module.imports[alias.asname or alias.name] = f"from {origin} import {alias.name}{renamed}"
        return
    if any(alias.asname for alias in node.names) or not file_of(origin).is_file():
        raise unfollowable(module, node)
    if needed:
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
    if not (origin.startswith(ROOMS) and file_of(origin).is_file()):
        return ABSENT.format(statement=ast.unparse(ast.ImportFrom(module=origin, names=node.names, level=0)))
    if any(alias.asname for alias in node.names):
        raise unfollowable(module, node)
    module.uses.append(origin)
    return f"pass  # in this file: {', '.join(alias.name for alias in node.names)}"


def file_of(name: str) -> Path:
    """Where a module of the package lies; there is no such file if the name is that of a folder."""
    return PACKAGE_FOLDER.joinpath(*name.split(".")[1:]).with_suffix(".py")


def origin_of(module: Module, node: ast.ImportFrom) -> str:
    """The absolute name of what a `from` import names."""
    above = module.name.split(".")[: -node.level] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def names_defined(node: ast.stmt) -> list[str]:
    """The names that a statement of a module's top level binds."""
    table = symtable.symtable(ast.unparse(node), "<statement>", "exec")
    return [symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()]


def unfollowable(module: Module, node: ast.Import | ast.ImportFrom) -> ValueError:
    """The refusal of an import that binds something else than names of one module."""
    return ValueError(
        f"{module.name} has `{ast.unparse(node)}`, which one file cannot follow: import the names that are needed from "
        "the module that defines them, without renaming."
    )
