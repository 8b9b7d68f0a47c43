"""What `pip install hf-drafthead` will do: wheel and sdist of a clean clone, each in an environment of its own.

    .venv/bin/python tests/tools/installed.py

An environment holds nothing but the package, and finds what that needs where this one has it. README's block runs
there, with steps that are not compiled, which takes long and is tried elsewhere. Exit code 1 where something fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
import sys
import hf_drafthead
from hf_drafthead.generation import programs
assert hf_drafthead.__file__.startswith(sys.prefix), hf_drafthead.__file__
programs.compiled = lambda function, config: function
exec(open("block.py").read(), {})
"""


def run(*words: object, cwd: Path) -> None:
    """Run a command without this checkout on its path; CalledProcessError where it fails."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    subprocess.run([str(word) for word in words], cwd=cwd, env=alone, check=True)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run("git", "clone", "--quiet", ROOT, folder / "clone", cwd=folder)
        blocks = re.findall(r"```python\n(.*?)```", (folder / "clone" / "README.md").read_text(), re.DOTALL)
        (folder / "block.py").write_text(next(block for block in blocks if "zoo" in block))
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "clone", cwd=folder)
        for built in sorted((folder / "dist").iterdir()):
            environment = folder / built.suffix
            venv.create(environment)
            python = environment / "bin" / "python"
            (site,) = environment.glob("lib/python*/site-packages")
            (site / "needed.pth").write_text(sysconfig.get_path("purelib"))
            how = ["--ignore-installed", "--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
            run(python, "-m", "pip", "install", *how, built, cwd=folder)
            run(python, "-c", CODE, cwd=folder)
            run(environment / "bin" / "hf-drafthead", "--version", cwd=folder)
            print(f"{built.name}: installed, and README's block runs", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as failed:
        sys.exit(f"exit code {failed.returncode} of {' '.join(failed.cmd[:6])}")
