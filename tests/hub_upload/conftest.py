"""The loopback Hub and its clients, one of each for all tests here; every test finds the Hub empty."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_upload.clients import Clients, printed
from tests.hub_upload.loopback import LoopbackHub


@pytest.fixture(scope="session")
def running(tmp_path_factory) -> Iterator[tuple[LoopbackHub, Clients]]:
    with LoopbackHub() as hub:
        clients = Clients(hub.url, tmp_path_factory.mktemp("clients"))
        yield hub, clients
        clients.close()


@pytest.fixture
def hub(running) -> Iterator[LoopbackHub]:
    """An empty Hub; afterwards, no token has been sent to its storage, and none was printed."""
    hub, clients = running
    hub.reset()
    clients.answers.clear()
    yield hub
    assert [one for one in hub.asked if one.storage and one.token] == []
    assert printed(clients.answers, tokens_of(hub)) == []


def tokens_of(hub: LoopbackHub) -> set[str]:
    """Those of users, and those that somebody has tried."""
    return {*hub.users, *(one.token for one in hub.asked if one.token)}


@pytest.fixture
def clients(running) -> Clients:
    return running[1]


@pytest.fixture
def base(hub, models):
    """org/base on the Hub."""
    return hub.add("org/base", {path.name: path.read_bytes() for path in (models / "base").iterdir()})


@pytest.fixture
def folder(models, tmp_path) -> Path:
    """A checkpoint without a card, that may go out once its base is named."""
    shutil.copytree(models / "medusa", tmp_path / "heads")
    return tmp_path / "heads"


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A tiny base with a tokenizer under base/, and heads for it under medusa/ and hydra/."""
    from tests.checkpoints import save_all

    return save_all(tmp_path_factory.mktemp("models"))
