"""The docs say what is so: code runs, fields are the configs' own, links lead somewhere, figures come from results."""

import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from hf_drafthead import DraftHeadConfig
from hf_drafthead.generation import programs
from hf_drafthead.modeling import families

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGE_OF = {
    "hydra++": "hydra-plus-plus",
    "amphista-alpha": "amphista",
    "eagle3.1": "eagle3",
    "dspark": "dflash",
}  # others: their name
# The config of each page's family; the first one where a page has several.
FAMILIES = {PAGE_OF.get(name, name): family.config() for name, family in reversed(families.FAMILIES.items())}
SECTIONS = ["Idea", "Drawing", "Config fields", "Recipe", "Figures", "When to choose it"]


def page_id(page: Path) -> str:
    return str(page.relative_to(DOCS))


def family_page(name: str) -> str:
    return (DOCS / "families" / f"{name}.md").read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    return found.strip()


def own_fields(config: DraftHeadConfig) -> set[str]:
    """The family's fields, the number of heads and the draft vocabulary."""
    shared = {field.name for field in fields(DraftHeadConfig)} - {"num_draft_heads", "draft_vocab_size"}
    return {field.name for field in fields(type(config))} - shared


def documented(page: str) -> dict[str, str]:
    """Field to value, as the table under "Config fields" has them."""
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| \S.* \|$", section(page, "Config fields"), re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a field is there twice"
    return dict(rows)


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")  # as for a script
        spec.loader.exec_module(module)
    return module


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("page", [page for page in PAGES if CODE.search(page.read_text(encoding="utf-8"))], ids=page_id)
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {}
    for block in CODE.findall(page.read_text(encoding="utf-8")):
        exec(compile(block, str(page), "exec"), names)


def test_every_family_shows_code():
    assert {page.stem for page in PAGES if CODE.search(page.read_text(encoding="utf-8"))} >= set(FAMILIES)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "hydra-plus-plus"])
def test_every_config_field_is_documented_with_its_default(name):
    config = FAMILIES[name]
    assert documented(family_page(name)) == {field: repr(getattr(config, field)) for field in own_fields(config)}


def test_hydra_plus_plus_documents_what_it_sets():
    config, plain = FAMILIES["hydra-plus-plus"], FAMILIES["hydra"]
    differing = {name for name in own_fields(config) if getattr(config, name) != getattr(plain, name)}
    assert documented(family_page("hydra-plus-plus")) == {name: repr(getattr(config, name)) for name in differing}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_page_has_every_section(name):
    page = family_page(name)
    titles = re.findall(r"^## (.*)$", page, re.MULTILINE)
    last = "What the paper leaves open" if name == "amphista" else "Where published code departs from the paper"
    assert titles == [*SECTIONS[:-1], last, SECTIONS[-1]]
    assert re.fullmatch(r"```text\n.*\n```.*", section(page, "Drawing"), re.DOTALL)
    idea = section(page, "Idea").replace("\n", " ")
    assert len(re.findall(r"[a-z][.?!](?= [A-Z]|$)", idea)) == 5


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_every_page_can_be_reached():
    found, waiting = set(), [DOCS / "README.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page not in found and page.is_relative_to(DOCS):
            found.add(page)
            links = re.findall(r"\]\(([^)#]+\.md)\)", page.read_text(encoding="utf-8"))
            waiting += [page.parent / link for link in links]
    assert found == {page.resolve() for page in PAGES}


def test_places_for_figures_are_ones_that_are_filled(figures):
    families = set(figures.FAMILIES)
    for page in [*PAGES, *(ROOT / "benchmarks" / "results").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        places = [place[2].split() for place in figures.PLACE.finditer(text)]
        assert len(places) == text.count("<!-- figures:") == text.count("<!-- end of figures -->")
        for table, *names in places:
            assert table in TABLES
            assert set(names) <= families


TABLES = {"families", "ablations", "norms", "young", "tried", "accuracies", "steps", "trainings"}
TABLES |= {"chat-families", "chat-topics", "chat-curve", "chat-bench"}


def test_figures_are_written_between_the_comments(figures, tmp_path):
    page = tmp_path / "deep" / "page.md"
    page.parent.mkdir()
    page.write_text(
        "a\n<!-- figures: one x y -->\nold\n<!-- end of figures -->\nb\n"
        "<!-- figures: none -->\n<!-- end of figures -->\n"
    )
    (tmp_path / "other.md").write_text("no figures\n")
    tables = {"one": lambda names: figures.markdown(["n"], [[name] for name in names]), "none": lambda names: ""}
    assert figures.fill(tmp_path, tables) == [page]
    assert page.read_text() == (
        "a\n<!-- figures: one x y -->\n| n |\n| --- |\n| x |\n| y |\n<!-- end of figures -->\nb\n"
        "<!-- figures: none -->\n*Not measured yet.*\n<!-- end of figures -->\n"
    )
    assert figures.fill(tmp_path, tables) == []
    with pytest.raises(ValueError, match=r"page\.md asks for the table 'one': expected one of none\.$"):
        figures.fill(tmp_path, {"none": tables["none"]})


def test_steps_are_those_of_the_families_asked_for(figures, tmp_path, monkeypatch):
    figures_of = {"step": 2.0, "verify": 1.5, "draft": 0.456, "bookkeeping": 0.04}
    rows = [{"model": name, "nodes": 8, "batch": 1, **figures_of} for name in ("hydra", "160m hydra", "hydra++")]
    monkeypatch.setattr(figures, "STEPS", tmp_path / "step.json")
    assert figures.steps([]) == ""
    figures.STEPS.write_text(figures.json.dumps(rows))
    found = figures.steps(["hydra"]).splitlines()
    assert found[2:] == [
        "| hydra | 8 | 1 | 2.00 | 1.50 | 0.46 | 0.04 |",
        "| 160m hydra | 8 | 1 | 2.00 | 1.50 | 0.46 | 0.04 |",
    ]
    assert len(figures.steps([]).splitlines()) == 2 + 3
    figures.STEPS.write_text(figures.json.dumps([*rows, {**rows[0], "nodes": 16, "captured_step": 0.9}]))
    assert [line.split(" | ")[-1] for line in figures.steps(["hydra"]).splitlines()[2:]] == [" |", " |", "0.90 |"]


def test_trainings_are_told_with_their_spread(figures, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "TRAININGS", tmp_path / "training.jsonl")
    assert figures.trainings() == ""
    numbers = {"perplexity": 10.0, "expected": 2.5, "generated": 2.5, "generated_steps": 1000}
    lines = [{"way": "own", "tokens_per_step": tau, **numbers} for tau in (2.0, 3.0)]
    lines.append({"way": "other", "tokens_per_step": 1.5, **numbers})
    figures.TRAININGS.write_text("".join(figures.json.dumps(line) + "\n" for line in lines))
    rows = figures.trainings().splitlines()[2:]
    assert rows[0] == "| own | 2.500 ± 0.500 | 10.000 ± 0.000 | 2.500 ± 0.000 | 2.500 ± 0.000 | 2,000 | 2 |"
    assert rows[1] == "| other | 1.500 | 10.000 | 2.500 | 2.500 | 1,000 | 1 |"


def test_tables_of_the_chat_model_say_how_much_text_the_heads_have_read(figures, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "CHAT", tmp_path / "chat.jsonl")
    assert figures.chat_families() == figures.chat_curve() == figures.chat_topics() == ""

    def line(family, text, tau, read=1):
        about = {"family": family, "text": text, "tokens": read * text, "hours": 0.2, "parameters": 4_560_000}
        return about | {"0": {"tokens_per_step": tau}, "1": {"tokens_per_step": tau - 0.5}}

    lines = [line("medusa", 500_000, 1.75), line("eagle3", 500_000, 2.25), line("medusa", 860_000, 2.0, read=5)]
    lines += [line("eagle3", 250_000, 1.8), line("eagle3", 900_000, 2.0)]
    lines[2]["0"]["by_category"] = {"writing": 1.5, "math": 2.5}
    for one in lines[-2:]:  # as heads have it that were not sampled from
        del one["1"]
    figures.CHAT.write_text("".join(figures.json.dumps(one) + "\n" for one in lines))
    assert figures.chat_families().splitlines()[2:] == [
        "| medusa | 4.6 | 0.86 | 4.3 | 2.00 | 1.50 |",
        "| medusa | 4.6 | 0.50 | 0.50 | 1.75 | 1.25 |",
        "| eagle3 | 4.6 | 0.50 | 0.50 | 2.25 | 1.75 |",
    ]
    assert figures.chat_topics().splitlines()[0] == "| heads | writing | math |"
    assert figures.chat_topics(["medusa"]).splitlines()[2:] == ["| medusa | 1.50 | 2.50 |"]
    assert figures.chat_topics(["eagle3"]) == ""
    assert figures.chat_curve().splitlines() == [
        "| million tokens read | medusa | eagle3 |",
        "| --- | --- | --- |",
        "| 0.25 |  | 1.80 |",
        "| 0.50 | 1.75 | 2.25 |",
        "| 0.90 |  | 2.00 |",
        "| 4.30 | 2.00 |  |",
    ]


def test_the_readme_promises_the_same_text_in_float32():
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    assert "the same text, in float32 token by token," in " ".join(words[:90])


def test_the_readme_s_code_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        programs, "compiled", lambda function, config: function
    )  # `test_compiled` does, which takes long
    blocks = CODE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    offline = [block for block in blocks if "FasterDecoding/" not in block]
    assert len(blocks) == 2 and len(offline) == 1
    exec(compile(offline[0], "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("def main(")
