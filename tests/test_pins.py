"""What CI installs are the pinned versions, each with its hash."""

import re

import pytest
from packaging.tags import Tag

from hf_drafthead.bases import releases
from tests.tools import newest
from tests.tools.hashes import CONSTRAINTS, HASHES, ROOT, fits, pinned


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


def test_the_releases_that_are_named_are_those_that_are_tested():
    oldest = pinned((ROOT / "constraints-oldest.txt").read_text().splitlines())
    assert releases.OLDEST == oldest["transformers"]
    assert releases.NEWEST == pinned(CONSTRAINTS.read_text().splitlines())["transformers"]
    required = (ROOT / "pyproject.toml").read_text()
    assert f'"transformers>={releases.OLDEST.removesuffix(".0")},<{releases.BEYOND}"' in required


@pytest.mark.parametrize(
    ("transformers", "torch", "later"),
    [
        ("5.24.0", "2.14.1+cu130", []),
        ("5.24.0", "2.13.0+cpu", []),
        ("5.25.0", "2.14.1", ["transformers 5.25.0 (tried: 5.24.0)"]),
        ("5.24.0", "2.15.0", ["torch 2.15.0 (tried: 2.14.1)"]),
    ],
)
def test_a_fault_of_today_is_ours_only_where_nothing_is_newer_than_what_was_tried(
    transformers, torch, later, monkeypatch
):
    monkeypatch.setattr(newest, "version", {"transformers": transformers, "torch": torch}.get)
    assert newest.newer("torch==2.13.0\ntransformers==5.24.0\n") == later


@pytest.mark.parametrize("code", [0, 1])
def test_what_broke_in_a_newer_release_is_said_and_fails_nothing(code, monkeypatch, capsys):
    monkeypatch.setattr(newest.sys, "argv", ["newest.py"])
    monkeypatch.setattr(newest, "third_line", lambda: "the README's third line shows no accepted guess")
    monkeypatch.setattr(newest.subprocess, "run", lambda *args, **kwargs: newest.subprocess.CompletedProcess(args, 0))
    monkeypatch.setattr(newest, "newer", lambda constraints: [] if code else ["transformers 5.25.0 (tried: 5.24.0)"])
    assert newest.main() == code
    said = "THE README'S THIRD LINE SHOWS NO ACCEPTED GUESS"
    assert capsys.readouterr().out.splitlines()[-1] == said + (
        "" if code else ", WITH TRANSFORMERS 5.25.0 (TRIED: 5.24.0)"
    )
