"""Real clients of the loopback Hub: processes of their own, with a fresh HF_HOME and the Hub's address from the start.

huggingface_hub reads its settings when it is imported, and importing transformers takes seconds: one process imports
everything once and is copied (`fork`) for each client, before it has asked anybody for anything. HF_HOME is the same
path for all; the folder there is swapped, so that every client finds its own.
"""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SERVER = """
import json, os, sys, traceback
import torch, transformers, hf_drafthead, hf_drafthead.cli, hf_drafthead.hub_upload
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline, LlamaForCausalLM
from hf_drafthead import MedusaForCausalLM, HydraForCausalLM
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        code = 0
        os.environ.update(asked["environ"])
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(asked["folder"] + "/" + name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(asked["folder"])
        try:
            exec(compile(asked["code"], "client", "exec"), {**globals(), "__name__": "client"})
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


@dataclass(frozen=True)
class Answer:
    """How a client ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> Any:
        """The last line of its output, as JSON."""
        assert self.code == 0, self.err
        return json.loads(self.out.splitlines()[-1])


def printed(answers: list[Answer], tokens: Iterable[str]) -> list[str]:
    """The tokens that clients have printed."""
    return [token for token in tokens if any(token in answer.out + answer.err for answer in answers)]


class Clients:
    """Runs Python as one client after the other."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder, self.url = folder, url
        self.runs = 0
        self.answers: list[Answer] = []
        self.home = folder / "home"
        environ = environment(url, self.home)
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.server.stdout is not None and self.server.stdin is not None
        assert self.server.stdout.readline() == "ready\n"

    def run(self, code: str, *, token: str | None = None, home: str | None = None, **names: Any) -> Answer:
        """Run code in a new process.

        Args:
            code: what to run; the names that the process imported at its start are there.
            token: who the client is signed in as.
            home: an HF_HOME to share with other clients of that name; by default nobody else's.
            names: JSON values that the code finds under these names.
        """
        self.runs += 1
        own = self.folder / f"client{self.runs}"
        real_home = self.folder / (f"home-{home}" if home else f"home{self.runs}")
        for folder in (own, real_home):
            folder.mkdir(exist_ok=True)
        self.home.unlink(missing_ok=True)
        self.home.symlink_to(real_home)
        given = "".join(f"{name} = json.loads({json.dumps(value)!r})\n" for name, value in names.items())
        order = {
            "code": f"import json\n{given}{textwrap.dedent(code)}",
            "environ": {"HF_TOKEN": token} if token else {},
            "folder": str(own),
        }
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        answer = Answer(
            int(self.server.stdout.readline()), *((own / name).read_text() for name in ("stdout", "stderr"))
        )
        self.answers.append(answer)
        return answer

    def close(self) -> None:
        """End the process that is copied."""
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait(20)


def environment(url: str, home: Path) -> dict[str, str]:
    """What a client's process finds in its environment."""
    foreign = ("HF_", "HUGGING", "TRANSFORMERS")
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(foreign)}
    return kept | {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",  # else every large file asks for a Xet token first, and there is no way back
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DISABLE_SAFETENSORS_CONVERSION": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
