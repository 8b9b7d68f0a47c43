"""The model code as one file does what the package does, where the package is not."""

import ast
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig

from hf_drafthead import EagleConfig, EagleForCausalLM, MedusaForCausalLM
from hf_drafthead.hub_upload import bundle
from hf_drafthead.hub_upload.bundle import FILE, MODELS, NEEDED_BY_SOME, add_bundle, build_bundle, needs_of
from hf_drafthead.modeling.checkpoint import read_heads_config
from tests.bases import tiny_base
from tests.families import FAMILIES
from tests.hub_upload.remote_code import PROMPT, SETTINGS

SCRIPT = Path(__file__).parent / "remote_code.py"
PYTHON = os.environ.get("REMOTE_CODE_PYTHON", sys.executable)  # one that has transformers and torch
# What transformers itself requires, and so is wherever transformers and torch are.
BROUGHT_ALONG = {"torch", "transformers", "safetensors", "huggingface_hub", "numpy", "tokenizers"}

# Tried each time, for a process of its own runs over all that are asked for, which takes long.
EACH_TIME = ("eagle",)
CASES = [family if family.name in EACH_TIME else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
all_families = pytest.mark.parametrize("family", CASES, ids=lambda family: family.name)
all_codes = pytest.mark.parametrize("code", sorted(MODELS))


def alone(folder: Path, modules: Path) -> dict:
    """Run the script by itself, away from this checkout and with a fresh place for the code it fetches."""
    run = subprocess.run(
        [PYTHON, "-I", str(SCRIPT), str(folder)],
        capture_output=True,
        text=True,
        cwd=modules,
        env={**os.environ, "HF_MODULES_CACHE": str(modules / "code"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> Path:
    """A base, and heads of every family for it that the run's tests ask for, each with the file of code."""
    cases = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    asked = {case.params["family"].name for case in cases if case and "family" in case.params} | {"eagle"}
    folder = tmp_path_factory.mktemp("bundled")
    base = tiny_base("llama-gqa")
    base.save_pretrained(folder / "base")
    base.name_or_path = base.config._name_or_path = str(folder / "base")
    for family in (one for one in FAMILIES if one.name in asked):
        family.build(base).save_pretrained(folder / family.name)
        add_bundle(folder / family.name)
    with_states = tiny_base("qwen3.5")
    with_states.save_pretrained(folder / "base-with-states")
    with_states.name_or_path = with_states.config._name_or_path = str(folder / "base-with-states")
    MedusaForCausalLM.from_base(with_states).save_pretrained(folder / "on-states")
    return folder


@pytest.fixture(scope="module")
def seen(folder, tmp_path_factory) -> dict:
    """What it finds, all of them in one process."""
    return alone(folder, tmp_path_factory.mktemp("remote_code"))


@pytest.mark.slow
@all_families
@pytest.mark.parametrize("case", ["greedy", "sampled", "alone", "penalised"])
def test_remote_code_gives_the_base_s_own_text(seen, family, case):
    assert seen["families"][family.name]["same"][case]


@pytest.mark.few(1)
@all_families
def test_heads_loaded_as_remote_code_guess_as_the_package_does(seen, folder, family):
    found = seen["families"][family.name]
    model = AutoModelForCausalLM.from_pretrained(folder / family.name, dtype=torch.float64)
    assert type(model).__module__.startswith("hf_drafthead.")
    greedy = model.generate(**PROMPT, **SETTINGS, do_sample=False)
    torch.manual_seed(3)
    sampled = model.generate(**PROMPT, **SETTINGS, do_sample=True, temperature=0.8, top_p=0.9)
    assert found["greedy"] == greedy.sequences.tolist()
    assert found["accepted_lengths"] == greedy.accepted_lengths.tolist()
    assert found["sampled_accepted_lengths"] == sampled.accepted_lengths.tolist()


def test_remote_code_follows_a_tree_on_a_base_that_keeps_states(seen, folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "on-states", dtype=torch.float64)
    greedy = model.generate(**PROMPT, **SETTINGS, do_sample=False)
    found = seen["families"]["on-states"]
    assert found["why_no_drafts"] is None
    assert found["same"]["greedy"] and found["accepted_lengths"] == greedy.accepted_lengths.tolist()


@all_families
def test_remote_code_drafts_and_compiles_nothing(seen, family):
    found = seen["families"][family.name]
    assert found["why_no_drafts"] is None
    assert found["static"] == found["greedy"]


@all_families
def test_classes_of_remote_code_are_those_of_the_file_and_carry_the_version(seen, family):
    found = seen["families"][family.name]
    assert found["class"] == family.model_class.__name__
    assert found["config"] == family.model_class.config_class.__name__
    assert found["module"].startswith("transformers_modules.")
    assert found["version"] == metadata.version("hf-drafthead")
    assert "hf_drafthead" not in seen["imported"]


@all_families
def test_remote_code_saves_and_loads_heads_with_and_without_their_base(seen, family):
    found = seen["families"][family.name]
    assert {"config.json", "model.safetensors", FILE} <= set(found["saved_files"])
    assert found["saved_code"]
    for again in found["saved_again"]:
        assert again["tensors"]
        assert again["greedy"] == found["greedy"]


@all_families
def test_remote_code_has_the_published_trees_and_no_other_texts(seen, family):
    found = seen["families"][family.name]
    assert found["published"]
    of_tree, of_texts = found["refusals"]
    assert "'nonesuch' is no published tree: expected one of eagle_mc_sim_7b_63, hydra_single," in of_tree
    assert "this needs hf_drafthead, of which only the model code is here" in of_texts


@pytest.mark.parametrize("trust", [True, None])
@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
def test_where_the_package_is_imported_its_classes_win(folder, auto, trust):
    model = auto.from_pretrained(folder / "eagle", trust_remote_code=trust)
    assert type(model) is EagleForCausalLM
    assert type(model.config) is EagleConfig


@all_codes
def test_the_file_is_the_same_every_time_and_compiles(code):
    text = build_bundle(code)
    assert text == build_bundle(code)
    compile(text, FILE, "exec")
    assert f'__version__ = "{metadata.version("hf-drafthead")}"' in text.splitlines()


@pytest.mark.few(1)
@all_codes
def test_the_file_imports_nothing_that_transformers_and_torch_do_not_bring(code):
    names = set()
    waiting: list[ast.AST] = [ast.parse(build_bundle(code))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
        if not isinstance(node, ast.Try):  # what may be absent
            waiting.extend(ast.iter_child_nodes(node))
    assert {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) <= BROUGHT_ALONG


@all_codes
def test_the_file_holds_no_other_family_than_those_it_needs(code):
    text = build_bundle(code)
    held = {one for one, model_class in MODELS.items() if f"class {model_class.__name__}(" in text}
    assert held == {code}


def test_the_config_says_where_the_code_is_and_keeps_the_rest(tmp_path, folder):
    shutil.copytree(folder / "eagle", tmp_path / "eagle")
    path = tmp_path / "eagle" / "config.json"
    before = {key: value for key, value in json.loads(path.read_text()).items() if key != "auto_map"}
    path.write_text(json.dumps(before))
    add_bundle(tmp_path / "eagle")
    once = path.read_bytes()
    add_bundle(tmp_path / "eagle")
    assert path.read_bytes() == once
    model = "modeling_drafthead.EagleForCausalLM"
    assert json.loads(once) == {
        **before,
        "auto_map": {"AutoConfig": "modeling_drafthead.EagleConfig", "AutoModel": model, "AutoModelForCausalLM": model},
    }


def test_what_is_no_draft_head_checkpoint_is_refused(tmp_path, folder):
    with pytest.raises(OSError, match="is no draft-head checkpoint .*: give the folder of a draft-head checkpoint"):
        add_bundle(tmp_path)
    with pytest.raises(ValueError, match="holds a 'llama' model without draft heads"):
        add_bundle(folder / "base")
    assert not (folder / "base" / FILE).exists()
    with pytest.raises(
        ValueError, match="there is no family 'lion': expected one of amphista, dflash, draft_model, eagle"
    ):
        build_bundle("lion")


@pytest.fixture
def rooms(tmp_path, monkeypatch):
    """Write modules of a small package: what each name holds."""

    def write(**sources: str) -> str:
        for name, text in sources.items():
            (tmp_path / "generation").mkdir(exist_ok=True)
            (tmp_path / "generation" / f"{name}.py").write_text(text)
        monkeypatch.setattr(bundle, "PACKAGE_FOLDER", tmp_path)
        return f"hf_drafthead.generation.{next(iter(sources))}"

    return write


def test_modules_stand_in_the_order_of_their_needs(rooms):
    name = rooms(
        top="from hf_drafthead.generation.middle import b\nfrom hf_drafthead.generation.low import a\n\nc = a + b\n",
        middle="from hf_drafthead.generation.low import a\n\nb = a + 1\n",
        low="a = 1\n",
    )
    modules = bundle.in_order(name)
    assert [module.text for module in modules] == ["a = 1", "b = a + 1", "c = a + b"]


def test_imports_inside_functions_are_resolved_too(rooms):
    name = rooms(
        top=(
            "def f():\n    from hf_drafthead.generation.late import g\n\n    return g()\n\n\n"
            "def h():\n    from hf_drafthead.hub_upload.push import push\n\n    return push\n"
        ),
        late="import math\n\n\ndef g():\n    return math.pi\n",
    )
    modules = bundle.in_order(name)
    assert [module.name.rpartition(".")[2] for module in modules] == ["top", "late"]
    space: dict = {"math": __import__("math")}
    text = "\n".join(module.text for module in modules)
    exec(text, space)
    assert space["f"]() == space["math"].pi
    assert "try:\n        from hf_drafthead.hub_upload.push import push\n    except ImportError as error:" in text


def test_what_is_imported_for_types_alone_needs_no_order(rooms):
    name = rooms(
        top="from hf_drafthead.generation.low import a\n\nb = a\n",
        low="if TYPE_CHECKING:\n    from hf_drafthead.generation.top import b\n    from typing import Any\n\na = 1\n",
    )
    modules = bundle.in_order(name)
    assert [module.text for module in modules] == ["a = 1", "b = a"]
    assert modules[0].imports == {"from typing import Any": "Any"}


def meanings(text: str) -> dict[str, set[str]]:
    """What the statements of a file's top level bind each name to."""
    found: dict[str, set[str]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = [node.name]
        else:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            inside = [one for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            bound = [one.id for one in inside if isinstance(one.ctx, ast.Store)]
            names = [] if isinstance(node, ast.AugAssign) else bound
        for name in names:
            found.setdefault(name, set()).add(ast.unparse(node))
    return found


@pytest.mark.few(1)
@all_codes
@pytest.mark.parametrize("needs", [(), NEEDED_BY_SOME], ids=["what all need", "what some need"])
def test_every_name_in_the_file_is_known_and_means_one_thing(code, needs, tmp_path):
    text = build_bundle(code, frozenset(needs))
    assert [name for name, statements in meanings(text).items() if len(statements) > 1] == []
    (tmp_path / FILE).write_text(text)
    words = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F822,F823", tmp_path / FILE]
    assert subprocess.run(list(map(str, words)), capture_output=True, text=True).stdout.startswith("All checks passed")


@pytest.mark.parametrize("text", ["x = 1\nx = 2\n", "import torch as F\n\n\ndef F(): ...\n", "x: int = 1\nx = y = 1\n"])
def test_a_name_of_two_meanings_is_found(text):
    assert any(len(statements) > 1 for statements in meanings(text).values())


def test_a_checkpoint_has_the_code_that_it_needs(folder, tmp_path):
    for name, needs in (("eagle", set()), ("on-states", {"states"})):
        assert needs_of(folder / name, read_heads_config(str(folder / name))) == needs
    config = read_heads_config(str(folder / "eagle"))
    for settings in (
        {"cache_implementation": "static"},
        {"compile_config": {"mode": "default"}},
        {"calibration": [{"execution": "eager"}, {"execution": "compiled"}]},
        {"calibration": [{"captured": True}]},
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
        assert needs_of(tmp_path, config) - {"calibrated"} == {"compiled"}
    settings = {"calibration": [{"execution": "eager"}], "acceptance": "typical"}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    (tmp_path / "adapter_config.json").touch()
    assert needs_of(tmp_path, config) == {"adapter", "calibrated", "other acceptance"}
    config.base_gguf_file = "base.gguf"
    assert needs_of(folder / "eagle", config) == {"gguf"}
    config.base_config = PreTrainedConfig(model_type="of_its_own")
    assert needs_of(folder / "eagle", config) == {"gguf", "states", "images"}


def test_the_code_is_written_anew_with_a_calibration(folder, tmp_path):
    model = MedusaForCausalLM.from_base(tiny_base("llama-gqa"))
    model.save_pretrained(tmp_path)
    assert "def tree_of" not in (tmp_path / FILE).read_text()
    model.generation_config.calibration = [{"execution": "eager"}]
    model.save_generation_config(tmp_path)
    assert "def tree_of" in (tmp_path / FILE).read_text()
    (tmp_path / FILE).unlink()
    model.save_generation_config(tmp_path)
    assert not (tmp_path / FILE).exists()


def test_published_trees_are_data_in_the_file():
    text = build_bundle("medusa")
    assert "'mc_sim_7b_63': [[0]," in text and "resources.files" not in text
