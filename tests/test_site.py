"""The site of the docs: it is built without a warning, every link leads somewhere, and it fetches nothing."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'hf-drafthead[docs]'")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_of_the_docs_is_there(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site) for path in site.rglob("*.html")}
    assert {Path(str(page).replace("README", "index")) for page in pages} <= built
    assert {Path(name) for name in ("quickstart.html", "commands.html", "figures.html", "changelog.html")} <= built


def test_pages_fetch_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe|source)[^>]* src="(https?:[^"]*)"', text)
        fetched += re.findall(r'<link[^>]* rel="(?:stylesheet|preload|preconnect)"[^>]* href="(https?:[^"]*)"', text)
        fetched += re.findall(r'<link[^>]* href="(https?:[^"]*)"[^>]* rel="(?:stylesheet|preload|preconnect)"', text)
        assert fetched == [], page.name


def test_the_reference_has_what_the_package_exports(site):
    import hf_drafthead

    text = (site / "reference.html").read_text(encoding="utf-8")
    assert [name for name in hf_drafthead.__all__ if not re.search(rf'id="hf_drafthead(\.\w+)*\.{name}"', text)] == []


def test_the_commands_are_those_of_the_command_line(site):
    from hf_drafthead.cli import app

    text = (site / "commands.html").read_text(encoding="utf-8")
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert "bench" in names and [name for name in names if f'id="hf-drafthead-{name}"' not in text] == []


@pytest.mark.parametrize(
    "page, written, shown",
    [
        ("families/medusa.md", "[a](../../benchmarks/RESULTS.md)", "[a](../figures.md)"),
        ("training.md", "[a](../README.md#use)", "[a](README.md#use)"),
        ("training.md", "[a](../hf_drafthead/zoo/__init__.py)", "a"),
        ("changelog.md", "[a](docs/training.md#x)", "[a](training.md#x)"),
        ("figures.md", "[a](../docs/families/medusa.md)", "[a](families/medusa.md)"),
        ("training.md", "[a](nowhere.md)", "[a](nowhere.md)"),
        ("training.md", "[a](https://example.org/b)", "[a](https://example.org/b)"),
    ],
)
def test_links_to_the_repository_lead_to_the_page_that_shows_the_file(hooks, page, written, shown):
    assert hooks.on_page_markdown(written, SimpleNamespace(file=SimpleNamespace(src_uri=page))) == shown
