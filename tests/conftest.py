"""What holds for every test: no network, the same random numbers in any order, nothing that transformers deprecates."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, so before anything else
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gc
import logging
import zlib
from collections import defaultdict

import pytest
import torch

from hf_drafthead import cli
from hf_drafthead.cli import common
from hf_drafthead.trees import choice, costs

MOST_CASES = 2  # of one test that `make test` runs
SHARED = "hub_upload"  # a folder whose tests come first, and so to one worker: what they share takes long to make


def pytest_configure(config):
    """Name the marks with which tests are kept out of the usual run."""
    config.addinivalue_line("markers", "slow: takes long; run by `make test-slow` and not by `make test`")
    config.addinivalue_line("markers", f"few(n): only n of its cases are not slow; without it {MOST_CASES}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test with many cases leave a few, evenly spread; mark the others as slow. Put those of `SHARED` first.

    Which one of neighbouring cases is left goes by its name: else it would have the same last parameter each time.
    """
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            continue
        found = item.get_closest_marker("few")
        cases[item.nodeid.partition("[")[0], found.args[0] if found else MOST_CASES].append(item)
    for (_, few), alike in cases.items():
        borders = [round(number * len(alike) / few) for number in range(few + 1)]
        for first, end in zip(borders, borders[1:]):
            left = min(alike[first:end], key=lambda item: zlib.crc32(item.nodeid.encode()), default=None)
            for item in alike[first:end]:
                if item is not left:
                    item.add_marker("slow")
    items.sort(key=lambda item: item.path.parent.name != SHARED)


def pytest_collection_finish():
    """What was collected stays to the end: collections of garbage, which every training asks for, pass it by."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Seed before the fixtures, so that what a test draws does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    """A worker cannot send text that UTF-8 does not know, which hostile files hold and messages quote: it would end."""
    return encodable((yield))


def encodable(data):
    """The same with surrogates escaped."""
    if isinstance(data, str):
        return data.encode("utf-8", "backslashreplace").decode()
    if isinstance(data, dict):
        return {key: encodable(value) for key, value in data.items()}
    return type(data)(map(encodable, data)) if isinstance(data, list | tuple) else data


@pytest.fixture
def command(capsys):
    """Runs `hf-drafthead` with some words; its exit code, output and messages."""

    def call(*words) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main([str(word) for word in words])
        return end.value.code or 0, *capsys.readouterr()

    return call


@pytest.fixture(autouse=True)
def no_line_of_progress(monkeypatch):
    """What a command prints does not depend on how fast the machine is."""
    monkeypatch.setattr(common, "LOG_SECONDS", float("inf"))


@pytest.fixture(autouse=True)
def steps_that_cost_nothing(monkeypatch, tmp_path_factory):
    """What a call drafts does not depend on how fast the machine is: without an entry every step pays."""
    monkeypatch.setattr(costs, "FILE", tmp_path_factory.getbasetemp() / "costs.json")
    monkeypatch.setattr(choice, "_TOLD", set())
    monkeypatch.setattr(costs, "_DOUBTED", {})
    monkeypatch.setattr(costs.StepCosts, "situation", "of a test")
    monkeypatch.setattr(costs.StepCosts, "__call__", lambda self, trees: costs.NodeCosts(dict.fromkeys(trees, 1.0)))


class DeprecationNotices(logging.Handler):
    """Collects what transformers logs about deprecated use; it logs these more often than it warns."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.notices: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record if it is about a deprecation."""
        if "deprecated" in record.getMessage():
            self.notices.append(record.getMessage())


@pytest.fixture(autouse=True)
def no_deprecated_use_of_transformers():
    """Fail the test during which transformers logs that something is deprecated."""
    handler = DeprecationNotices()
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert handler.notices == []
