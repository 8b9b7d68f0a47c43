"""The zoo's text: the source of the Python standard library, found in the interpreter that runs.

Which files are held out depends on their names only, so prompts from held-out files of one Python version remain unseen
in training when the zoo is rebuilt with another.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# Excluded: tests, packages of other projects, and generated code or data (codecs, tables, help texts).
_SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idle_test",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
_TABLES = {"html/entities.py", "locale.py", "stringprep.py"}
_GENERATED = ("_sysconfigdata", "config-")  # differ from machine to machine
_HELD_OUT_PER_MILLE = 40


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus: its name relative to the library, with forward slashes, and its text."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the file is kept from training, decided by a hash of its name (about 4% of the files)."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 1000 < _HELD_OUT_PER_MILLE


def library_folder() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_corpus(folder: Path | None = None) -> list[SourceFile]:
    """All files of the corpus in the order of their names.

    Args:
        folder: a standard library folder; the running interpreter's by default.

    Raises:
        OSError: the folder holds no Python source (some distributions ship only byte code).
    """
    folder = library_folder() if folder is None else folder
    files = []
    for path in folder.rglob("*.py"):
        relative = path.relative_to(folder)
        name = relative.as_posix()
        if _SKIPPED_FOLDERS.intersection(relative.parts) or name in _TABLES or name.startswith(_GENERATED):
            continue
        text = path.read_bytes().decode("utf-8", errors="ignore").replace("\r\n", "\n")
        if text.strip():
            files.append(SourceFile(name, text))
    if not files:
        raise OSError(f"no Python source in {folder}: expected a standard library, use an interpreter that ships it.")
    return sorted(files, key=lambda file: file.name)


def text_hash(files: list[SourceFile]) -> str:
    """SHA-256 over names and texts, in order: equal if and only if two builds saw the same corpus."""
    digest = hashlib.sha256()
    for file in files:
        for part in (file.name, file.text):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
