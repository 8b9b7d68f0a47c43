"""A saved golden base, and heads that their own projects have written for it."""

from pathlib import Path

import pytest
import torch

from tests.bases import tiny_base
from tests.formats.originals import ORIGINALS, Original
from tests.modeling.golden import golden_base

collect_ignore = ["in_speculators.py"]  # a script for another environment


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory) -> Path:
    """Folder of the base that all golden heads but those of EAGLE-3 are for."""
    folder = tmp_path_factory.mktemp("golden") / "base"
    golden_base().save_pretrained(folder)
    return folder


@pytest.fixture(params=ORIGINALS, ids=lambda original: original.golden)
def original(request) -> Original:
    return request.param


@pytest.fixture
def heads(original, golden_folder, tmp_path) -> Path:
    """Folder of the heads as their project saves them."""
    original.write(tmp_path / "heads", golden_folder)
    return tmp_path / "heads"


@pytest.fixture
def base(tmp_path):
    base = tiny_base("llama-gqa", dtype=torch.float32, num_hidden_layers=8)
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = base.config._name_or_path = str(tmp_path / "base")
    return base
