"""`hf-drafthead page`: what it refuses, and that it serves."""

import importlib.util
import itertools
import socket
import subprocess
import sys
import time
from urllib.request import urlopen

import pytest

from hf_drafthead import zoo


def test_without_gradio_it_says_what_to_install(monkeypatch, command):
    find = importlib.util.find_spec
    monkeypatch.setattr("hf_drafthead.cli.models.find_spec", lambda name: None if name == "gradio" else find(name))
    said = "hf-drafthead: the page needs gradio: pip install 'hf-drafthead[page]'.\n"
    assert command("page", zoo.path("medusa")) == (2, "", said)


@pytest.mark.slow
def test_it_serves_until_it_is_interrupted():
    pytest.importorskip("gradio")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "hf_drafthead", "page", zoo.path("medusa"), "--port", port]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for _ in range(1200):
            with socket.socket() as probe:
                if process.poll() is not None or probe.connect_ex(("127.0.0.1", int(port))) == 0:
                    break
            time.sleep(0.1)
        assert process.poll() is None, process.stdout.read()
        assert b"Draft heads: medusa" in urlopen(f"http://127.0.0.1:{port}/", timeout=60).read()
        told = f"the page is at http://127.0.0.1:{port}/ (Ctrl-C ends it).\n"
        assert told in itertools.takewhile(lambda line: "share=True" not in line, process.stdout)
    finally:
        process.terminate()
        process.wait(20)
