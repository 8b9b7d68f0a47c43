"""Which definitions of some modules are needed: those that are used by name, beginning with a few.

A class keeps the methods that something needed calls by their name, those with two underscores, and those that take
the place of another library's. What is called by a name that is put together at run time is not found: the caller
names it. Docstrings are left out.
"""

import ast
import importlib
import keyword
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

NOTHING: Mapping[str, str] = MappingProxyType({})
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Definition:
    """A statement of a module's top level, or a method of a class.

    first, last: its lines, comments right above it included; names: what it defines; uses: names that it mentions;
    methods: of a class, which it does not include; always: whether it is kept wherever what it is in is.
    """

    node: ast.stmt
    first: int
    last: int
    names: set[str]
    uses: set[str]
    methods: list["Definition"] = field(default_factory=list)
    always: bool = False


def needed(
    texts: Mapping[str, str], roots: Collection[str], instead: Mapping[str, str] = NOTHING
) -> tuple[dict[str, str], set[str]]:
    """The modules' texts without what nothing needs, and every name that they mention.

    A module of which nothing is left is not among them.

    Args:
        texts: by the names of the modules, without imports between them.
        roots: names of the definitions to begin with.
        instead: statements that take the place of the bodies of functions, or of methods by `Class.method`.
    """
    texts = {name: replaced(text, instead) for name, text in texts.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    modules = {name: definitions(name, text, trees[name]) for name, text in texts.items()}
    everything = [*filter(FirstTime(), (definition for in_module in modules.values() for definition in in_module))]
    defined = {name for definition in everything for name in definition.names}
    used: set[str] = set(roots)
    needed: set[int] = set()
    while True:
        before = len(needed)
        for definition in everything:
            effect = not definition.names  # such as a loop that sets attributes: as needed as what it works on
            wanted = bool(definition.uses & defined & used) if effect else bool(definition.names & used)
            for part in (definition, *definition.methods) if wanted else ():
                if id(part) not in needed and (part is definition or part.always or part.names & used):
                    needed.add(id(part))
                    used |= part.uses
        if len(needed) == before:
            break
    shortened = {name: without_rest(texts[name], trees[name], in_module, needed) for name, in_module in modules.items()}
    return {name: text for name, text in shortened.items() if text}, used


class FirstTime:
    """Whether an assignment is the first of its text, such as `logger = ...` in several modules; others always are."""

    def __init__(self) -> None:
        self.texts: set[str] = set()

    def __call__(self, definition: Definition) -> bool:
        if not isinstance(definition.node, ast.Assign):
            return True
        before, text = len(self.texts), ast.unparse(definition.node)
        self.texts.add(text)
        return len(self.texts) > before


def replaced(text: str, instead: Mapping[str, str]) -> str:
    """A module's text with other bodies of some functions, which then take any arguments."""
    if not any(name.rpartition(".")[2] in text for name in instead):
        return text
    lines, tree = text.splitlines(), ast.parse(text)
    functions: dict[str, Any] = {node.name: node for node in tree.body if isinstance(node, (*Function, ast.ClassDef))}
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        functions |= {f"{kind.name}.{node.name}": node for node in kind.body if isinstance(node, Function)}
    for name in sorted(set(functions) & set(instead), key=lambda name: -functions[name].lineno):
        node = functions[name]
        head = f"class {name}:" if isinstance(node, ast.ClassDef) else f"def {node.name}(*given, **named):"
        lines[node.lineno - 1 : node.end_lineno] = [
            textwrap.indent(f"{head}\n{textwrap.indent(instead[name], ' ' * 4)}", " " * node.col_offset)
        ]
    return "\n".join(lines)


def definitions(module: str, text: str, tree: ast.Module) -> list[Definition]:
    """What stands in a module, in its order."""
    lines, in_module = text.splitlines(), []
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # the docstring
            continue
        whole = Definition(node, first_line(node, lines), node.end_lineno or 0, names_of(node), set())
        parts = [node]
        if isinstance(node, ast.ClassDef):
            theirs = foreign_names(module, node.name)
            for method in (part for part in node.body if isinstance(part, Function)):
                always = method.name in theirs or (method.name.startswith("__") and method.name.endswith("__"))
                part = Definition(method, first_line(method, lines), method.end_lineno or 0, {f".{method.name}"}, set())
                part.uses, part.always = set(mentioned(method)), always
                whole.methods.append(part)
            parts = [*node.bases, *node.keywords, *node.decorator_list]  # type: ignore[list-item]
            parts += [part for part in node.body if not isinstance(part, Function)]
        whole.uses = {name for part in parts for name in mentioned(part)}
        in_module.append(whole)
    return in_module


def names_of(node: ast.stmt) -> set[str]:
    """What a statement of the top level defines; nothing for one that only has an effect."""
    if isinstance(node, (*Function, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        inside = [part for target in targets for part in ast.walk(target)]
        return {part.id for part in inside if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return set()


def mentioned(node: ast.AST) -> Iterator[str]:
    """Every name in a piece of code; behind a dot those of attributes, which `getattr` finds by strings too."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield f".{part.attr}"
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isidentifier():
            if not keyword.iskeyword(part.value):
                yield f".{part.value}"


def foreign_names(module: str, name: str) -> set[str]:
    """What the classes of other packages that a class inherits from have: its methods of these names are theirs."""
    kind: Any = getattr(importlib.import_module(module), name, None)
    package = module.partition(".")[0]
    bases = [base for base in getattr(kind, "__mro__", ()) if base.__module__.partition(".")[0] != package]
    return {key for base in bases for key in vars(base)}


def first_line(node: Any, lines: list[str]) -> int:
    """The first line of a statement, with its decorators and the comments right above."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    while first > 1 and lines[first - 2].lstrip().startswith("#"):
        first -= 1
    return first


def without_rest(text: str, tree: ast.Module, in_module: list[Definition], needed: Collection[int]) -> str:
    """A module's text without the definitions that are not kept, and without docstrings."""
    if not any(id(definition) in needed for definition in in_module):
        return ""
    before = text.splitlines()
    lines: list[str | None] = [*before]
    for definition in in_module:
        if id(definition) not in needed:
            lines[definition.first - 1 : definition.last] = [None] * (definition.last - definition.first + 1)
            continue
        kept_methods = {method.node for method in definition.methods if id(method) in needed}
        for part in getattr(definition.node, "body", ()) if isinstance(definition.node, ast.ClassDef) else ():
            if isinstance(part, Function) and part not in kept_methods:
                first = first_line(part, before)
                lines[first - 1 : part.end_lineno] = [None] * ((part.end_lineno or 0) - first + 1)
    for node in ast.walk(tree):
        if isinstance(node, (*Function, ast.ClassDef, ast.Module)) and ast.get_docstring(node) is not None:
            first, last = node.body[0].lineno - 1, node.body[0].end_lineno or 0
            if lines[first] is None:
                continue
            only = len(node.body) == 1 and not isinstance(node, ast.Module)  # a docstring is all that it has
            lines[first:last] = [f"{' ' * node.body[0].col_offset}..." if only else None, *[None] * (last - first - 1)]
    return squeezed(lines)


def squeezed(lines: list[str | None]) -> str:
    """The lines that are left, with an empty one in front of each definition of the top level."""
    left: list[str] = []
    for line in lines:
        if line is None or not line.strip():
            continue
        begins = line.startswith(("def ", "class ", "@", "async def "))
        if begins and left and not left[-1].startswith(("@", "#")):
            left.append("")
        left.append(line)
    return "\n".join(left)
