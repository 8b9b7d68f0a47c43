"""The package's model code as one file, for places where only transformers and torch are installed.

transformers fetches that file from the repository of the weights if `trust_remote_code=True` is given. It holds the
modules that a family needs, each after the modules that it imports: imports between them are removed, all other imports
stand once at the top, and the published trees are included as data.
"""

import functools
import inspect
import json
from pathlib import Path

from hf_drafthead.generation import tree as tree_module
from hf_drafthead.hub_upload.bundle_modules import in_order
from hf_drafthead.modeling.checkpoint import read_heads_config
from hf_drafthead.modeling.config import MODEL_TYPE_PREFIX
from hf_drafthead.modeling.families import BY_MODEL_TYPE
from hf_drafthead.version import __version__

FILE = "modeling_drafthead.py"
MODELS = {name.removeprefix(MODEL_TYPE_PREFIX): model_class for name, model_class in BY_MODEL_TYPE.items()}

HEADER = '''\
# Made from hf_drafthead {version}, which holds the same code module by module, with its tests and documentation.
# Where that package is imported, its own classes are used instead of these.
"""A base model with {family} heads, whose `generate` returns the base's own text in fewer forward passes."""

from __future__ import annotations

{imports}

__version__ = "{version}"
'''


def add_bundle(folder: Path) -> None:
    """Write the model code of a checkpoint into its folder, and into its config.json where transformers finds it."""
    model_type = read_heads_config(str(folder)).model_type
    family = model_type.removeprefix(MODEL_TYPE_PREFIX)
    code = build_bundle(family)
    model_class = MODELS[family]
    stem = Path(FILE).stem
    auto_map = dict.fromkeys(("AutoModel", "AutoModelForCausalLM"), f"{stem}.{model_class.__name__}")
    (Path(folder) / FILE).write_text(code, encoding="utf-8")
    path = Path(folder) / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields["auto_map"] = {"AutoConfig": f"{stem}.{model_class.config_class.__name__}", **auto_map}
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@functools.cache
def build_bundle(family: str) -> str:
    """The model code of a family (`medusa`, ...) as one Python file; the same package gives the same text."""
    if family not in MODELS:
        raise ValueError(f"there is no family {family!r}: expected one of {', '.join(sorted(MODELS))}.")
    modules = in_order(MODELS[family].__module__)
    trees = next(module for module in modules if module.name == tree_module.__name__)
    trees.text = trees.text.replace(inspect.getsource(tree_module._tree_files).strip(), tree_data())
    statements = sorted({statement for module in modules for statement in module.imports})
    # `import x` before `from x import y`, as everywhere in the package
    imports = sorted(statements, key=lambda statement: not statement.startswith("import "))
    header = HEADER.format(family=family, version=__version__, imports="\n".join(imports))
    parts = [f"# ---- {module.name.replace('.', '/')}.py\n\n{module.text}" for module in modules]
    return "\n\n\n".join([header.strip(), *parts]) + "\n"


def tree_data() -> str:
    """The function that gives the published trees, with the trees themselves in it."""
    lines = [f"        {name!r}: {paths}," for name, paths in sorted(tree_module._tree_files().items())]
    return "\n".join(["def _tree_files():", "    return {", *lines, "    }"])
