"""Without the Hub, a file that could not be looked up is not taken for one that is not there."""

import shutil
from pathlib import Path

import pytest
from transformers import AutoModel

from hf_drafthead import MedusaForCausalLM, convert_checkpoint, export_checkpoint
from hf_drafthead.serving import options_of
from tests.bases import tiny_base

COMMIT = "3" * 40
NOT_ASKED = "(couldn.t connect to|[cC]annot find the requested files|offline)"
WAYS = {
    "convert": lambda cache: convert_checkpoint("org/medusa", base_model="org/base", cache_dir=cache),
    "from_pretrained(convert=True)": lambda cache: MedusaForCausalLM.from_pretrained(
        "org/medusa", convert=True, base_model="org/base", cache_dir=cache
    ),
    "from_pretrained": lambda cache: MedusaForCausalLM.from_pretrained("org/medusa", cache_dir=cache),
    "local_files_only": lambda cache: MedusaForCausalLM.from_pretrained(
        "org/medusa", cache_dir=cache, local_files_only=True
    ),
    "from_base": lambda cache: MedusaForCausalLM.from_base("org/medusa", cache_dir=cache),
    "export": lambda cache: export_checkpoint("org/medusa", cache / "new", "vllm", cache_dir=cache),
}


def cached(cache: Path, name: str, files: Path, *patterns: str) -> None:
    """Some files of a folder, as the Hub's cache has them."""
    place = cache / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    (place / "snapshots" / COMMIT).mkdir(parents=True)
    for pattern in patterns:
        for file in files.glob(pattern):
            shutil.copy(file, place / "snapshots" / COMMIT)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A base and Medusa heads, also in another project's layout."""
    folder = tmp_path_factory.mktemp("models")
    tiny_base("llama-gqa").save_pretrained(folder / "base")
    heads = MedusaForCausalLM.from_base(folder / "base")
    heads.config.base_model_name_or_path = "org/base"
    heads.save_pretrained(folder / "heads")
    export_checkpoint(folder / "heads", folder / "theirs", "tgi")
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_a_model_of_which_nothing_is_in_the_cache_was_not_looked_up(tmp_path, way):
    with pytest.raises(OSError, match=NOT_ASKED):
        WAYS[way](tmp_path)


@pytest.mark.parametrize("form", ["heads", "theirs"])
def test_weights_beside_a_config_in_the_cache_were_not_looked_up(tmp_path, models, form):
    cached(tmp_path, "org/medusa", models / form, "config.json")
    with pytest.raises(OSError, match=f"'org/medusa' (holds no|cannot be read) .*{NOT_ASKED}"):
        WAYS["from_pretrained" if form == "heads" else "convert"](tmp_path)


@pytest.mark.parametrize("part", ["nothing of it", "its config"])
def test_a_base_that_is_not_in_the_cache_was_not_looked_up(tmp_path, models, part):
    cached(tmp_path, "org/medusa", models / "heads", "*")
    if part == "its config":
        cached(tmp_path, "org/base", models / "base", "config.json")
    reason = NOT_ASKED if part == "nothing of it" else "does not appear to have a file"  # transformers' own word
    with pytest.raises(OSError, match=f"the base 'org/base' of 'org/medusa' cannot be read .*{reason}"):
        AutoModel.from_pretrained("org/medusa", cache_dir=tmp_path)


def test_what_is_in_the_cache_loads_though_optional_files_were_never_looked_up(tmp_path, models):
    cached(tmp_path, "org/medusa", models / "heads", "config.json", "model.safetensors")
    cached(tmp_path, "org/base", models / "base", "config.json", "model.safetensors")
    model = AutoModel.from_pretrained("org/medusa", cache_dir=tmp_path)
    assert model.config.base_model_revision == COMMIT and type(model) is MedusaForCausalLM


def test_a_model_to_serve_that_is_not_in_the_cache_was_not_looked_up(tmp_path):
    pytest.importorskip("fastapi")
    from hf_drafthead.serving.served import Served

    with pytest.raises(OSError, match=NOT_ASKED):
        Served(options_of("org/none-at-all"))
