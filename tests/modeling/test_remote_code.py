"""`trust_remote_code=True` stands for importing the package: a checkpoint's code is a file that imports it."""

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM

from hf_drafthead import MedusaConfig, MedusaForCausalLM, from_base, zoo
from hf_drafthead.modeling.families import MODEL_CLASSES
from hf_drafthead.modeling.remote_code import CODE_FILE, code_of, code_references
from tests.bases import tiny_base

# The code that checkpoints held which were pushed before, that of Medusa heads; it imports what transformers 5.24 has.
FROZEN = lzma.decompress((Path(__file__).parent / "frozen_code.py.xz").read_bytes())
of_this_release = Version(transformers.__version__) <= Version("5.24.0")
frozen = pytest.mark.skipif(not of_this_release, reason="a later transformers may lack what frozen code imports")

CHILD = """\
import json, sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_drafthead":
            raise ModuleNotFoundError(f"No module named {name!r}")
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, pipeline
sys.meta_path.insert(0, NotInstalled())
(tokenizer, *folders), trust, told = sys.argv[1:], {"trust_remote_code": True}, {}
for load in (AutoConfig, AutoModelForCausalLM):
    try:
        load.from_pretrained(folders[-1], **trust)
    except ImportError as error:
        told[load.__name__] = str(error)
sys.meta_path.pop(0)
ids = torch.tensor([[5, 9, 33, 21]])
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder, **trust)
    out = model.generate(ids, max_new_tokens=10, return_dict_in_generate=True, draft_tree=[[0], [1]])
    model.save_pretrained(folder + "-saved")
    write = pipeline("text-generation", model=folder, tokenizer=tokenizer, **trust)
    told[folder] = {
        "class": type(model).__module__,
        "again": [type(load.from_pretrained(folder, **trust)).__name__ for load in (AutoConfig, AutoModel)],
        "pipeline": type(write.model).__name__,
        "drafts": out.accepted_lengths is not None,
        "why_no_drafts": model.why_no_drafts(),
        "same": torch.equal(out.sequences, model.base.generate(ids, max_new_tokens=10)),
    }
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """Two bases in folders, one of which has layers that keep a state."""
    folder = tmp_path_factory.mktemp("bases")
    for name, base in {"llama": tiny_base(), "lfm2": tiny_base("lfm2")}.items():
        base.save_pretrained(folder / name)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def told(bases, tmp_path_factory) -> dict:
    """What a process says that loads these checkpoints, and has not imported the package."""
    folder = tmp_path_factory.mktemp("heads")
    for family, base in (("medusa", "lfm2"), ("hydra", "lfm2"), ("medusa", "llama")):
        from_base(str(bases[base]), family).save_pretrained(folder / f"{family}-{base}")
    old = folder / "medusa-llama"
    (old / CODE_FILE).write_bytes(FROZEN)
    folders = [*([old] if of_this_release else []), folder / "medusa-lfm2", folder / "hydra-lfm2"]
    run = subprocess.run(
        [sys.executable, "-c", CHILD, zoo.path("base"), *map(str, folders)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_MODULES_CACHE": str(folder / "code"), "HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout.splitlines()[-1])
    return {Path(name).name: of_one for name, of_one in said.items()} | {"folder": folder}


@pytest.mark.parametrize("load", ["AutoConfig", "AutoModelForCausalLM"])
def test_where_the_package_is_missing_transformers_names_it(told, load):
    assert told[load].endswith("not found in your environment: hf_drafthead. Run `pip install hf_drafthead`")


@pytest.mark.parametrize("name", ["medusa-lfm2", "hydra-lfm2"])
def test_a_checkpoint_loads_without_an_import_and_drafts_beside_others(told, name):
    family = name.partition("-")[0].title()
    assert told[name] == {
        "class": f"hf_drafthead.modeling.{family.lower()}",
        "again": [f"{family}Config", f"{family}ForCausalLM"],
        "pipeline": f"{family}ForCausalLM",
        "drafts": True,
        "why_no_drafts": None,
        "same": True,
    }


def test_what_was_loaded_so_is_saved_with_the_same_file_and_no_code(told):
    first, again = (told["folder"] / name for name in ("medusa-lfm2", "medusa-lfm2-saved"))
    assert {path.name for path in again.glob("*.py")} == {CODE_FILE}
    assert (again / CODE_FILE).read_text() == (first / CODE_FILE).read_text()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (first, again)]
    assert configs[0]["auto_map"] == configs[1]["auto_map"]


@frozen
def test_the_code_of_checkpoints_that_were_pushed_before_runs_as_it_is(told):
    found = told["medusa-llama"]
    assert found["class"].startswith("transformers_modules.medusa_hyphen_llama.")
    assert found["drafts"] and found["same"] and found["pipeline"] == "MedusaForCausalLM"


@pytest.mark.parametrize("trust", [True, None])
def test_where_the_package_is_imported_code_beside_the_heads_neither_runs_nor_stays(bases, tmp_path, trust):
    from_base(str(bases["llama"]), "medusa").save_pretrained(tmp_path)
    (tmp_path / CODE_FILE).write_text("raise SystemExit('it ran')")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trust)
    assert type(model) is MedusaForCausalLM
    model.save_pretrained(tmp_path)
    assert (tmp_path / CODE_FILE).read_text() == code_of(MedusaConfig)


@pytest.mark.parametrize("model_class", MODEL_CLASSES, ids=lambda model_class: model_class.__name__)
def test_the_file_imports_config_and_model_of_the_family_in_a_few_lines(model_class, tmp_path):
    config_class = model_class.config_class
    config_class().save_pretrained(tmp_path)
    text = (tmp_path / CODE_FILE).read_text()
    names: dict = {}
    exec(compile(text, CODE_FILE, "exec"), names)
    of_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    classes = {auto: names[reference.rpartition(".")[2]] for auto, reference in of_map.items()}
    assert classes == {"AutoConfig": config_class, "AutoModel": model_class, "AutoModelForCausalLM": model_class}
    assert len(text.splitlines()) <= 30


def test_a_config_that_names_other_code_names_ours_when_it_is_loaded(tmp_path):
    MedusaConfig().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("modeling_drafthead", "theirs"))
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert config.auto_map == code_references(MedusaConfig)


def test_a_class_derived_from_ours_is_saved_with_its_own_code(tmp_path):
    """As transformers does it: only this package's own classes are known to be importable elsewhere."""

    class OwnConfig(MedusaConfig):
        model_type = "drafthead_own"

    OwnConfig.register_for_auto_class()
    OwnConfig().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.py")] == [Path(__file__).name]
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "test_remote_code.OwnConfig"
    }
