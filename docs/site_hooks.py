"""What the site shows besides this folder: pages that are written elsewhere, and the help of every command."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ELSEWHERE = {  # page of the site: file of the repository
    "figures.md": "benchmarks/RESULTS.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s:]+)(#[^)]*)?\)")  # text, target inside the repository, anchor


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are written elsewhere, and the reference of the command line."""
    for page, source in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "commands.md", content=commands()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to the pages that are written elsewhere, and leave only the text of links to code."""
    uri = page.file.src_uri
    folder = (ROOT / ELSEWHERE.get(uri, f"docs/{uri}")).parent
    pages = {ROOT / source: name for name, source in ELSEWHERE.items()} | {ROOT / "README.md": "README.md"}
    up = "../" * uri.count("/")

    def led(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = (folder / target).resolve()
        if path in pages:
            return f"[{text}]({up}{pages[path]}{anchor})"
        if path.is_relative_to(ROOT / "docs"):
            return f"[{text}]({up}{path.relative_to(ROOT / 'docs').as_posix()}{anchor})"
        return text if path.exists() else link[0]  # a link that leads nowhere stays, and mkdocs complains of it

    return LINK.sub(led, markdown)


def commands() -> str:
    """The help of every command, as typer writes it for documents."""
    import typer
    from typer.cli import get_docs_for_click

    from hf_drafthead.cli import app

    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="hf-drafthead")
    return get_docs_for_click(obj=command, ctx=context, name="hf-drafthead", title="Commands")
