"""The package's model code as one file, for places where only transformers and torch are installed.

transformers fetches that file from the repository of the weights if `trust_remote_code=True` is given. It holds the
modules that a family needs, each after the modules that it imports: imports between them are removed, all other imports
stand once at the top, and the published trees are included as data.
"""

import functools
import json
from pathlib import Path

from hf_drafthead.generation import tree as tree_module
from hf_drafthead.generation.tree import DraftTree, published_trees
from hf_drafthead.hub_upload.bundle_modules import check_names, in_order
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.config import MODEL_TYPE_PREFIX
from hf_drafthead.modeling.families import BY_MODEL_TYPE
from hf_drafthead.version import __version__

FILE = "modeling_drafthead.py"

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
    model_type = str(config.get("model_type"))
    if not model_type.startswith(MODEL_TYPE_PREFIX):
        raise ValueError(
            f"{str(folder)!r} holds a {model_type!r} model without draft heads: give a draft-head checkpoint."
        )
    family = model_type.removeprefix(MODEL_TYPE_PREFIX)
    code = build_bundle(family)
    model_class = families_in_code()[family]
    stem = Path(FILE).stem
    config["auto_map"] = {
        "AutoConfig": f"{stem}.{model_class.config_class.__name__}",
        "AutoModel": f"{stem}.{model_class.__name__}",
        "AutoModelForCausalLM": f"{stem}.{model_class.__name__}",
    }
    (Path(folder) / FILE).write_text(code, encoding="utf-8")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@functools.cache
def build_bundle(family: str) -> str:
    """The model code of a family as the text of one Python file; the same package gives the same text.

    Args:
        family: `medusa`, `hydra`, ..., as in the `model_type` of its config.

    Raises:
        ValueError: there is no such family, or its modules cannot stand in one file.
    """
    if family not in families_in_code():
        raise ValueError(f"there is no family {family!r}: expected one of {', '.join(sorted(families_in_code()))}.")
    modules = in_order(families_in_code()[family].__module__, {(tree_module.__name__, "_tree_files"): tree_data()})
    check_names(modules)
    statements = sorted({statement for module in modules for statement in module.imports.values()})
    # `import x` before `from x import y`, as everywhere in the package
    imports = sorted(statements, key=lambda statement: not statement.startswith("import "))
    header = HEADER.format(family=family, version=__version__, imports="\n".join(imports))
    parts = [f"# ---- {module.name.replace('.', '/')}.py\n\n{module.text}" for module in modules]
    return "\n\n\n".join([header.strip(), *parts]) + "\n"


def families_in_code() -> dict[str, type[DraftHeadPreTrainedModel]]:
    """The model class of every family, by the name in its `model_type`."""
    return {name.removeprefix(MODEL_TYPE_PREFIX): one for name, one in BY_MODEL_TYPE.items()}


def tree_data() -> str:
    """The published trees, and the function that finds them."""
    trees = {name: [list(path) for path in DraftTree.from_name(name).paths] for name in published_trees()}
    return TREE_FILES.replace("@TREES@", "\n".join(f'    "{name}": {paths},' for name, paths in trees.items())).strip()
