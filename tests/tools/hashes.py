"""Writes `hashes.txt`: the versions of `constraints.txt` with the sha256 of every file that fits this platform.

    python tests/tools/hashes.py [WHEEL ...]    # wheels from elsewhere, such as that of torch for CPUs alone

The index is asked for the hashes of its files. `.ci/run` installs from `hashes.txt`, so that a file that is not the
published one is refused; run this on CI's platform whenever a version in `constraints.txt` changes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[2]
CONSTRAINTS, HASHES = ROOT / "constraints.txt", ROOT / "hashes.txt"
SIMPLE_API = "application/vnd.pypi.simple.v1+json"


def pinned(lines: Iterable[str]) -> dict[str, str]:
    """Versions by normalized name, of lines `name==version`; options and comments are passed over."""
    pins = (line.split("#")[0].split() for line in lines)
    found = (words[0].split("==") for words in pins if words and "==" in words[0])
    return {canonicalize_name(name): version for name, version in found}


def fits(filename: str, version: str, tags: frozenset) -> bool:
    """Whether a file is a wheel of that version for this platform, or its source."""
    try:
        if filename.endswith(".whl"):
            _, of, _, its_tags = parse_wheel_filename(filename)
            return of == Version(version) and not tags.isdisjoint(its_tags)
        return filename.endswith(".tar.gz") and parse_sdist_filename(filename)[1] == Version(version)
    except (InvalidWheelFilename, ValueError):  # names of long ago
        return False


def published(name: str) -> list[dict]:
    """The files of a package on the index."""
    # not above: a process that imports pip cannot import setuptools afterwards, which a compiler of steps needs
    from pip._internal.models.index import PyPI

    request = urllib.request.Request(f"{PyPI.simple_url}/{name}/", headers={"Accept": SIMPLE_API})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["files"]


def main(wheels: list[str]) -> None:
    tags = frozenset(sys_tags())
    found: dict[str, list[str]] = defaultdict(list)
    for wheel in map(Path, wheels):
        found[parse_wheel_filename(wheel.name)[0]].append(hashlib.sha256(wheel.read_bytes()).hexdigest())
    lines = ["# Written by tests/tools/hashes.py; of Linux on x86-64 with Python 3.11, as CI has."]
    for name, version in pinned(CONSTRAINTS.read_text().splitlines()).items():
        found[name] += [one["hashes"]["sha256"] for one in published(name) if fits(one["filename"], version, tags)]
        if not found[name]:
            raise SystemExit(f"the index has no file of {name} {version} for this platform.")
        lines.append(" \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{one}" for one in sorted(found[name]))]))
    HASHES.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
