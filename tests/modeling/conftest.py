"""A saved base and saved heads, of every family or of two that stand for all."""

from pathlib import Path

import pytest
import torch

from tests.bases import tiny_base
from tests.families import FAMILIES


@pytest.fixture(scope="session", params=FAMILIES, ids=lambda family: family.name)
def family(request):
    return request.param


@pytest.fixture
def base():
    return tiny_base("llama-gqa")


@pytest.fixture
def saved(family, base, tmp_path) -> tuple[Path, object]:
    """Folder with `base` and `heads` in it, and the model that was saved there."""
    base.save_pretrained(tmp_path / "base")
    model = family.build(base)
    model.config.base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "heads")
    return tmp_path, model


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield
