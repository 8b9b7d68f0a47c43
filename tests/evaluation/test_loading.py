"""Names of families."""

import pytest

from hf_drafthead.evaluation.loading import known_families
from hf_drafthead.modeling import AmphistaConfig, EagleConfig, HydraConfig, MedusaConfig


@pytest.mark.parametrize(
    "config, name",
    [
        (MedusaConfig(), "medusa"),
        (HydraConfig(), "hydra"),
        (HydraConfig.plus_plus(), "hydra++"),
        (AmphistaConfig(), "amphista"),
        (AmphistaConfig.alpha(), "amphista-alpha"),
        (EagleConfig(), "eagle"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_family_is_named_as_in_the_papers(config, name):
    assert config.family == name


def test_every_model_class_is_a_known_family():
    assert known_families() == ["amphista", "eagle", "hydra", "medusa"]
