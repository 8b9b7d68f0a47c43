"""What CI installs are the pinned versions, each with its hash."""

import re

import pytest
from packaging.tags import Tag

from tests.tools.hashes import CONSTRAINTS, HASHES, fits, pinned


def test_hashes_are_of_the_pinned_versions():
    assert pinned(HASHES.read_text().splitlines()) == pinned(CONSTRAINTS.read_text().splitlines())


def test_every_version_has_a_hash():
    packages = re.split(r"\n(?=\S)", HASHES.read_text().strip())[1:]
    assert len(packages) == len(pinned(CONSTRAINTS.read_text().splitlines()))
    for package in packages:
        assert re.fullmatch(r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", package), package


@pytest.mark.parametrize(
    ("filename", "found"),
    [
        ("some-1.0-py3-none-any.whl", True),
        ("some-1.0.0-py3-none-any.whl", True),
        ("some-1.1-py3-none-any.whl", False),
        ("some-1.0-py3-none-plan9.whl", False),
        ("some-1.0.tar.gz", True),
        ("some-1.1.tar.gz", False),
        ("some-1.0.exe", False),
        ("some.whl", False),
    ],
)
def test_files_that_fit(filename, found):
    assert fits(filename, "1.0", frozenset([Tag("py3", "none", "any")])) == found
