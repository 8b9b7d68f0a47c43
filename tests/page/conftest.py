"""One bundled model for all tests of the page, in float64: there tokens are compared."""

import pytest
import torch

from hf_drafthead import zoo
from hf_drafthead.evaluation.loading import load


@pytest.fixture(scope="session")
def hydra():
    """Model and tokenizer."""
    model, tokenizer = load(zoo.path("hydra"), dtype=torch.float64)
    return model.eval(), tokenizer
