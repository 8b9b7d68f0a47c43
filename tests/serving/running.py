"""`hf-drafthead serve` on 127.0.0.1, or its application in this process, for tests that ask it something."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hf_drafthead.serving import NEEDED, options_of


def needed() -> None:
    """Skip a test where the packages for serving are missing."""
    for name in NEEDED:
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'hf-drafthead[serving]'")


@contextmanager
def in_process(folder: Path, **settings: Any) -> Iterator[Any]:
    """A client of the application, which asks it without a network; what is `served` is its attribute."""
    needed()
    from starlette.testclient import TestClient

    from hf_drafthead.serving.app import build
    from hf_drafthead.serving.served import Served

    served = Served(options_of(str(folder), device="cpu", dtype="float32", **settings))
    with TestClient(build(served), raise_server_exceptions=False) as client:
        client.served = served
        yield client
        served.stop()
    served.manager.join()


@contextmanager
def running_server(folder: Path, log: Path, *options: str, stop: int = signal.SIGTERM) -> Iterator[str]:
    """The address of a server of the model in a folder; what it says goes into `log`. At the end it is told to stop."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["serve", str(folder), "--host", "127.0.0.1", "--port", port, "--device", "cpu", "--dtype", "float32"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        program = [sys.executable, "-m", "hf_drafthead", *words, *options]
        process = subprocess.Popen(program, env=environ, stdout=output, stderr=output)
    try:
        for _ in range(3000):
            with socket.socket() as probe:
                if process.poll() is not None or probe.connect_ex(("127.0.0.1", int(port))) == 0:
                    break
            time.sleep(0.1)
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(stop)
        process.wait(60)
