"""`hf-drafthead serve` on 127.0.0.1, for tests that ask it something."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

OURS = ("-m", "hf_drafthead")
NEEDED = ("fastapi", "uvicorn", "openai", "starlette")


def served() -> None:
    """Skip a test where the packages for serving are missing."""
    for name in NEEDED:
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'transformers[serving]'")


@contextmanager
def running_server(folder: Path, log: Path, *options: str, program: tuple[str, ...] = OURS) -> Iterator[str]:
    """The address of a server of the model in a folder; what it says goes into `log`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["serve", str(folder), "--host", "127.0.0.1", "--port", port, "--device", "cpu", "--dtype", "float32"]
    words += options
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, *program, *words], env=environ, stdout=output, stderr=output)
    try:
        for _ in range(3000):
            with socket.socket() as probe:
                if process.poll() is not None or probe.connect_ex(("127.0.0.1", int(port))) == 0:
                    break
            time.sleep(0.1)
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)
