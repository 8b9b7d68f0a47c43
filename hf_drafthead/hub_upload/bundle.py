"""The package's model code as one file, for places where only transformers and torch are installed.

transformers fetches that file from the repository of the weights if `trust_remote_code=True` is given. It holds the
definitions that decoding with a family needs, those of a module after those of the modules that it imports: imports
between them are removed, all other imports stand once at the top, and the published trees are included as data.
Docstrings stand in the package alone. What one file cannot follow, such as an import of a whole module or two meanings
of a name, a test finds in the file.
"""

import ast
import functools
import inspect
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.cache_utils import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import ADAPTER_CONFIG_NAME, GENERATION_CONFIG_NAME

from hf_drafthead.generation import tree as tree_module
from hf_drafthead.hub_upload.needed import needed
from hf_drafthead.modeling.checkpoint import read_heads_config
from hf_drafthead.modeling.config import MODEL_TYPE_PREFIX, DraftHeadConfig
from hf_drafthead.modeling.families import BY_MODEL_TYPE
from hf_drafthead.modeling.files import edit_json, read_json
from hf_drafthead.version import __version__

FILE = "modeling_drafthead.py"
MODELS = {name.removeprefix(MODEL_TYPE_PREFIX): model_class for name, model_class in BY_MODEL_TYPE.items()}
PACKAGE = "hf_drafthead."
PACKAGE_FOLDER = Path(__file__).parents[1]
ROOMS = ("hf_drafthead.bases.", "hf_drafthead.generation.", "hf_drafthead.modeling.")

HEADER = '''\
# Made from hf_drafthead {version}, which holds the same code module by module, with its tests and documentation.
# Where that package is imported, its own classes are used instead of these.
"""A base model with {family} heads, whose `generate` returns the base's own text in fewer forward passes."""

from __future__ import annotations

{imports}

__version__ = "{version}"
'''

CALLED_BY_USERS = (".why_no_drafts",)
# What only makes, trains, converts, measures or publishes heads, copies guesses from other texts, and defends against
# files of others: a repository whose code is run is trusted, and its config was checked when it was saved. By function
# or class, what stands in the place of its body.
ONLY_IN_THE_PACKAGE = 'raise ImportError("this needs hf_drafthead, of which only the model code is here: install it.")'
INSTEAD = dict.fromkeys(
    (
        "LoadableModel.from_base",
        "MtpForCausalLM.from_base",
        "LoadableModel._from_other_layout",
        "DraftHeadPreTrainedModel.push_to_hub",
        "plain_state",
        "save_adapter",
        "check_merged_names",
        "copied_from",
        "accepted_copies",
    ),
    ONLY_IN_THE_PACKAGE,
)
INSTEAD["TextIndex"] = f"""\
@classmethod
def of(cls, texts, tokenizer=None):
    if texts is not None:
        {ONLY_IN_THE_PACKAGE}"""
INSTEAD["DraftPlan.texts_on"] = "return None"
INSTEAD["DraftHeadPreTrainedModel._save_tokenizer"] = """\
logger.warning_once("The base's tokenizer is saved with hf_drafthead, of which only the model code is here.")"""
CONFIGS = ("DraftHeadConfig", *(model_class.config_class.__name__ for model_class in MODELS.values()))
HAVE_A_START = ("Drafter", "DFlashDrafter", "MtpDrafter", "OutputProjections")
INSTEAD |= dict.fromkeys(
    (
        "_refuse_costly",
        "_refuse_shadowing",
        "_check_header",
        "refuse_misspelt",
        "refuse_unfit",
        "Drafter.check_values",
        "LoadableModel._refuse_other_family",
        "DraftHeadPreTrainedModel._refuse_loss_of_others",
        *(f"{name}.check" for name in CONFIGS),
        *(f"{name}.copy_from_base" for name in HAVE_A_START),
    ),
    "pass",
)
# of an error of the Hub what transformers says of it is left
INSTEAD |= dict.fromkeys(("how_to_convert", "why_refused", "DraftHeadPreTrainedModel._code_writer"), "return None")
INSTEAD |= {"is_deep": "return False", "DecoderLayer._through_again": "return given[0]._through(*given[1:])"}
# What only some checkpoints need, by the reason; and what is there in the code of the others.
STATES, KEYS, IMAGES, ADAPTER, GGUF = "states", "keys", "images", "adapter", "gguf"
COMPILED, CALIBRATED, OTHER_ACCEPTANCE = "compiled", "calibrated", "other acceptance"
NEEDED_BY_SOME = {
    STATES: {  # of a base that keeps states no mixer is known then
        "mixers_of": "return {}",
        "called": "return []",
        "SlotCache._fold": ONLY_IN_THE_PACKAGE,
        "BaseReader._read_on": ONLY_IN_THE_PACKAGE,
        "BaseReader._read_tree": ONLY_IN_THE_PACKAGE,
        **dict.fromkeys(("Mixer", "TreeTables", "RecurrentLayer", "RecurrentSlotLayer"), "pass"),
    },
    KEYS: {
        "kinds_of": "return []",
        "key_layers": "return []",
        "_with_known": "return given[2], given[1]",
        "BaseReader.with_keys": ONLY_IN_THE_PACKAGE,
        "BaseReader.known": ONLY_IN_THE_PACKAGE,
        "WrittenKeys": "pass",
    },
    IMAGES: {
        "_of_text": "return given[1]",
        "auto_class": "return AutoModelForCausalLM",
        "OutputLayer._find_decoder": "return True",
        "BaseReader._more": "return {}",
        "read_and_try": "raise Unsupported(f\"the code here does not read {', '.join(given[1].unusual)}\")",
    },
    CALIBRATED: {
        "matching": """\
if given[0]:
    logger.warning_once("A calibration is read with hf_drafthead, of which only the model code is here.")""",
        "nearest": "return None",
        "tokens_of": "return None",
        "drafter_hash": "return None",
        "CalibrationKey.of_entry": ONLY_IN_THE_PACKAGE,
        "DraftSettings._of_entry": ONLY_IN_THE_PACKAGE,
    },
    OTHER_ACCEPTANCE: {"preferred_choices": ONLY_IN_THE_PACKAGE},
    COMPILED: {
        "Execution.with_compiler": """\
logger.warning_once("Steps are not compiled: that needs hf_drafthead, of which only the model code is here.")
return given[0]("recorded", records=True) if given[1] else given[0]("eager")""",
        "Runner._program": ONLY_IN_THE_PACKAGE,
        "Runner._compiled": ONLY_IN_THE_PACKAGE,
        **dict.fromkeys(("Program", "Left", "SlotCache.split", "SlotCache._move_apart"), "pass"),
    },
    ADAPTER: {
        "_behind_adapter": "return *given, None",
        "HeadsSource.adapter": f"""\
if "_adapter_model_path" in (given[0].heads.get("adapter_kwargs") or {{}}):
    {ONLY_IN_THE_PACKAGE}
return None, {{}}""",
        "adapt": "pass",
        "load_adapter": ONLY_IN_THE_PACKAGE,
        "DraftHeadPreTrainedModel.load_adapter": ONLY_IN_THE_PACKAGE,
    },
    GGUF: {
        "split_gguf": "return given[0], None",
        "beside": "return ''",
        "gguf_arguments": "return dict(given[1])",
        "reading_gguf": "yield",
        "gguf_tokenizer": ONLY_IN_THE_PACKAGE,
    },
}

READ_BY = {"gemma4_assistant": {KEYS}}  # families

# Takes the place of an import, inside a function, of what only the package has.
ABSENT = """\
try:
    {statement}
except ImportError as error:
    raise ImportError("hf_drafthead is not installed, and only its model code is here: install it.") from error"""


def add_bundle(folder: Path) -> None:
    """Write the model code of a checkpoint into its folder, and into its config.json where transformers finds it."""
    config = read_heads_config(str(folder))
    family = config.model_type.removeprefix(MODEL_TYPE_PREFIX)
    (folder / FILE).write_text(build_bundle(family, needs_of(folder, config)), encoding="utf-8")
    model_class, stem = MODELS[family], Path(FILE).stem
    auto_map = dict.fromkeys(("AutoModel", "AutoModelForCausalLM"), f"{stem}.{model_class.__name__}")
    auto_map["AutoConfig"] = f"{stem}.{model_class.config_class.__name__}"
    edit_json(folder / "config.json", auto_map=auto_map)


def refresh_bundle(folder: Path) -> None:
    """Write the code of a checkpoint anew, where there is some: other settings may need more of it."""
    if (folder / FILE).is_file():
        add_bundle(folder)


def needs_of(folder: Path, config: DraftHeadConfig) -> frozenset[str]:
    """Which of NEEDED_BY_SOME a checkpoint with this config needs."""
    base: Any = config.base_config
    text = base.get_text_config(decoder=True)
    in_transformers = base.model_type in CONFIG_MAPPING  # else it has code of its own, and may be anything
    file = folder / GENERATION_CONFIG_NAME
    settings = read_json(file) if file.is_file() else {}
    needs = {
        STATES: not in_transformers or any(hasattr(layer, "conv_states") for layer in DynamicCache(config=text).layers),
        IMAGES: not in_transformers or text is not base,
        COMPILED: _compiles(settings),
        CALIBRATED: bool(settings.get("calibration")),
        OTHER_ACCEPTANCE: settings.get("acceptance", "exact") != "exact",
        ADAPTER: config.adapter_name_or_path is not None or (folder / ADAPTER_CONFIG_NAME).is_file(),
        GGUF: config.base_gguf_file is not None,
    }
    return frozenset(name for name, needed in needs.items() if needed)


def _compiles(settings: Mapping[str, Any]) -> bool:
    """Whether calls with these settings compile steps, or were calibrated for calls that do."""
    entries = [entry for entry in settings.get("calibration") or () if isinstance(entry, dict)]
    calibrated = any(entry.get("execution") == "compiled" or entry.get("captured") for entry in entries)
    return calibrated or settings.get("cache_implementation") == "static" or bool(settings.get("compile_config"))


@functools.cache
def build_bundle(family: str, needs: frozenset[str] = frozenset()) -> str:
    """The model code of a family (`medusa`, ...) as one Python file; the same package gives the same text.

    needs: of NEEDED_BY_SOME, what the checkpoint needs.
    """
    if family not in MODELS:
        raise ValueError(f"there is no family {family!r}: expected one of {', '.join(sorted(MODELS))}.")
    model_class = MODELS[family]
    modules = in_order(model_class.__module__)
    trees = next(module for module in modules if module.name == tree_module.__name__)
    lines = [f"        {name!r}: {paths}," for name, paths in sorted(tree_module._tree_files().items())]
    data = "\n".join(["def _tree_files():", "    return {", *lines, "    }"])
    trees.text = trees.text.replace(inspect.getsource(tree_module._tree_files).strip(), data)
    roots = {model_class.__name__, model_class.config_class.__name__, *CALLED_BY_USERS}
    rest = [bodies for reason, bodies in NEEDED_BY_SOME.items() if reason not in needs | READ_BY.get(family, set())]
    instead = functools.reduce(operator.or_, rest, INSTEAD)
    texts, used = needed({module.name: module.text for module in modules}, roots, instead)
    statements = sorted({statement for module in modules for statement, name in module.imports.items() if name in used})
    imports = [statement for statement in statements if statement.startswith("import ")]
    of_module: dict[str, list[str]] = {}
    for origin, _, name in (statement.partition(" import ") for statement in statements if statement not in imports):
        of_module.setdefault(origin, []).append(name)
    imports += [f"{origin} import {', '.join(names)}" for origin, names in of_module.items()]
    header = HEADER.format(family=family, version=__version__, imports="\n".join(imports))
    parts = [f"# ---- {name.replace('.', '/')}.py\n{text}" for name, text in texts.items()]
    return "\n\n".join([header.strip(), *parts]) + "\n"


@dataclass
class Module:
    """One module of the package, as it goes into the file.

    text: without its imports; imports: its statements that import from elsewhere, each with the one name that it
    binds; needs: modules that have to stand before it; uses: modules that its functions import.
    """

    name: str
    text: str = ""
    imports: dict[str, str] = field(default_factory=dict)
    needs: list[str] = field(default_factory=list)
    uses: list[str] = field(default_factory=list)


def in_order(name: str) -> list[Module]:
    """A module after all others that it imports; modules that only functions import come last."""
    modules: dict[str, Module] = {}

    def put(module_name: str) -> None:
        if module_name in modules:
            return
        module = read_module(module_name)
        for earlier in module.needs:
            put(earlier)
        modules[module_name] = module

    put(name)
    while later := [
        module_name for module in modules.values() for module_name in module.uses if module_name not in modules
    ]:
        put(later[0])
    return list(modules.values())


def read_module(name: str) -> Module:
    """A module's text without its imports, and what these name."""
    place = PACKAGE_FOLDER.joinpath(*name.split(".")[1:])
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    source = file.read_text(encoding="utf-8")
    module, lines = Module(name), source.splitlines()
    replaced: dict[int, tuple[int | None, str]] = {}  # first line: last line, and what comes in their place
    for node in ast.parse(source).body:
        # What is only imported for annotations binds the same names, but nothing has to stand before the module for it.
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        inside = node.body if isinstance(node, ast.If) and for_types else [node]
        imports = [statement for statement in inside if isinstance(statement, (ast.Import, ast.ImportFrom))]
        if len(imports) == len(inside):
            for imported in imports:
                take_import(module, imported, needed=not for_types)
            replaced[node.lineno] = node.end_lineno, ""
            continue
        for statement in ast.walk(node):
            if isinstance(statement, ast.ImportFrom) and f"{statement.module}.".startswith(PACKAGE):
                indent = " " * statement.col_offset
                text = "\n".join(indent + line for line in local_import(module, statement).splitlines())
                replaced[statement.lineno] = statement.end_lineno, text
    for first in sorted(replaced, reverse=True):
        last, text = replaced[first]
        lines[first - 1 : last] = [text] if text else []
    module.text = re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip()
    return module


def take_import(module: Module, node: ast.Import | ast.ImportFrom, needed: bool) -> None:
    """Note an import of a module's top level."""
    if isinstance(node, ast.Import):
        names = {alias: alias.asname or alias.name.partition(".")[0] for alias in node.names}
        module.imports |= {ast.unparse(ast.Import([alias])): name for alias, name in names.items()}
    elif node.module == "__future__":  # stands at the top of the file anyway
        return
    elif not f"{node.module}.".startswith(PACKAGE):
        names = {alias: alias.asname or alias.name for alias in node.names}
        module.imports |= {ast.unparse(ast.ImportFrom(node.module, [alias], 0)): name for alias, name in names.items()}
    elif needed:
        module.needs.append(str(node.module))


def local_import(module: Module, node: ast.ImportFrom) -> str:
    """What takes the place of an import from the package inside a function."""
    origin = str(node.module)
    if not origin.startswith(ROOMS):
        return ABSENT.format(statement=ast.unparse(node))
    module.uses.append(origin)
    return f"pass  # in this file: {', '.join(alias.name for alias in node.names)}"
