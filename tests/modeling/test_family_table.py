"""The table of families: every other room reads it, so that a new family is a module and a line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import hf_drafthead
from hf_drafthead import modeling
from hf_drafthead.generation.settings import DEFAULT_TREE
from hf_drafthead.modeling.families import FAMILIES, MODEL_CLASSES, find_family, fresh_heads
from tests.bases import tiny_base

PACKAGE = Path(hf_drafthead.__file__).parent

# The line that a new family adds to the table, its module, and what must come of these two.
LINE = 'Family("lion", "Lion", "0000.00000", LionForCausalLM, LionConfig, {"learning_rate": 0.125}),'
MODULE = '''\
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.medusa import MedusaConfig, MedusaDrafter


class LionConfig(MedusaConfig):
    """As many heads as a lion."""

    model_type = "drafthead_lion"


class LionForCausalLM(DraftHeadPreTrainedModel):
    """A base with a lion's heads."""

    config_class = LionConfig
    config: LionConfig
    drafter_class = MedusaDrafter
'''
SCRIPT = """\
import json, sys
from pathlib import Path

from transformers import AutoModel

import hf_drafthead
from hf_drafthead import LionConfig, LionForCausalLM
from hf_drafthead.cards.card import write_card
from hf_drafthead.evaluation.loading import summarize
from hf_drafthead.hub_upload import staging
from hf_drafthead.modeling.families import fresh_heads
from hf_drafthead.training.arguments import DraftHeadTrainingArguments
from benchmarks.zoo_recipe.heads import FAMILIES as ZOO
from tests.bases import tiny_base
from tests.families import FAMILIES as TESTED

folder = Path(sys.argv[1])
fresh_heads("lion", tiny_base()).save_pretrained(folder)
card = write_card(folder).read_text()
print(json.dumps({
    "package": hf_drafthead.__file__,
    "exported": {"LionConfig", "LionForCausalLM"} <= set(hf_drafthead.__all__),
    "auto": type(AutoModel.from_pretrained(folder, base_model=tiny_base())).__name__,
    "recipe": DraftHeadTrainingArguments.for_family("lion", str(folder)).learning_rate,
    "info": summarize(str(folder))["family"],
    "tag": "lion" in staging.FAMILIES,
    "title": "Lion" in card,
    "cited": "0000.00000" in card,
    "code": "from hf_drafthead import LionConfig, LionForCausalLM" in (folder / "modeling_drafthead.py").read_text(),
    "zoo": "lion" in ZOO,
    "tested": "lion" in [family.name for family in TESTED],
}))
"""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_named_as_its_config_says(name):
    assert FAMILIES[name].name == name == FAMILIES[name].config().family


def test_families_are_those_of_the_papers():
    assert {"medusa", "hydra", "hydra++", "amphista", "amphista-alpha", "eagle"} <= set(FAMILIES)
    assert FAMILIES["hydra++"].config().prefix_layer


@pytest.mark.parametrize("model_class", MODEL_CLASSES, ids=lambda model_class: model_class.__name__)
def test_config_and_model_are_exported_and_registered(model_class):
    for kind in (model_class.config_class, model_class):
        for package in (hf_drafthead, modeling):
            assert getattr(package, kind.__name__) is kind and kind.__name__ in package.__all__
    config = AutoConfig.for_model(model_class.config_class.model_type)
    assert type(config) is model_class.config_class
    for auto in (AutoModel, AutoModelForCausalLM):
        assert auto._model_mapping[type(config)] is model_class


@pytest.mark.parametrize("name", FAMILIES)
def test_fresh_heads_are_of_the_family(name):
    model = fresh_heads(name, tiny_base(dtype=torch.float32, num_hidden_layers=7))
    assert type(model) is FAMILIES[name].model_class and model.config.family == name


def test_an_unknown_family_is_refused():
    with pytest.raises(
        ValueError, match=r"^the family 'hidra' is not known: expected one of amphista, amphista-alpha, "
    ):
        find_family("hidra")


@pytest.mark.slow
def test_a_new_family_is_a_module_and_a_line(tmp_path):
    package = tmp_path / "copy" / "hf_drafthead"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("assets", "__pycache__"))
    shutil.copytree(Path(__file__).parents[1], tmp_path / "copy" / "tests", ignore=shutil.ignore_patterns("golden"))
    (package / "modeling" / "lion.py").write_text(MODULE)
    table = (package / "modeling" / "families.py").read_text()
    imported = "from hf_drafthead.modeling.lion import LionConfig, LionForCausalLM\n"
    table = table.replace("\n\n@dataclass", f"{imported}\n\n@dataclass", 1)
    (package / "modeling" / "families.py").write_text(table.replace("_TABLE = (\n", f"_TABLE = (\n    {LINE}\n", 1))
    (tmp_path / "heads").mkdir()
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "heads")],
        capture_output=True,
        text=True,
        cwd=tmp_path / "copy",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "copy"), "HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found.pop("package") == str(package / "__init__.py")
    expected = {"auto": "LionForCausalLM", "recipe": 0.125, "info": "lion"}
    assert found == {**dict.fromkeys(found, True), **expected}


def test_the_default_tree_is_named_in_one_place():
    named = [path for path in PACKAGE.rglob("*.py") if f'"{DEFAULT_TREE}"' in path.read_text(encoding="utf-8")]
    assert [path.name for path in named] == ["settings.py"]
