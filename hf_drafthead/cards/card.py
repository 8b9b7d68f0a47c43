"""Write a model card from the facts of a checkpoint, around what a person wrote into an earlier one."""

import math
import re
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import CardData, EvalResult, ModelCard, ModelCardData

from hf_drafthead.cards.facts import Facts, counts_in_words, is_hub_id, read_facts
from hf_drafthead.cards.sections import REBUILT, merge
from hf_drafthead.modeling.families import FAMILIES
from hf_drafthead.modeling.files import in_one_line

CARD_FILES = resources.files("hf_drafthead.cards")
TASK = "text-generation"
WHOLE, UNCATEGORISED = "all", "uncategorised"  # all prompts of a run, and those that name no category
# all of an absolute path but its last name
PATH = re.compile(r"(?<![\w.:/~-])(?:file://)?(?:~\w*|[A-Za-z]:)?[/\\](?:[^\s'\"/\\]+[/\\])*(?=[^\s'\"/\\])")
METRICS = {"tokens_per_step": "Tokens per step", "speedup": "Speedup over the base"}


def write_card(folder: Path, *, repo_id: str | None = None, license: str | None = None) -> Path:
    """Write README.md into a checkpoint's folder, from the facts in its files; the path of the card.

    Sections that a person wrote, and metadata that the facts do not determine, stay as they are. The same facts give
    the same bytes.

    Args:
        repo_id: where it will be found; its folder's name by default.
        license: its id on the Hub; by default that of the existing card, or of the training summary.

    Raises:
        OSError, ValueError: as `read_facts` does, or the existing card's metadata is no YAML.
    """
    folder = Path(folder)
    facts = read_facts(folder)
    path = folder / "README.md"
    old = read_card(path) if path.is_file() else ModelCard("---\n{}\n---\n")
    repo_id = repo_id or folder.resolve().name
    data = card_data(facts, old.data, repo_id.rpartition("/")[2], license)
    written = ModelCard(render(facts, data, repo_id))
    written.text = "\n" + merge(old.text, written.text)
    written.save(path)
    return path


def missing(folder: Path) -> list[str]:
    """What the card in a folder lacks before it may be published, each with what to do; raises as `write_card` does."""
    path = Path(folder) / "README.md"
    if not path.is_file():
        return [f"card: there is no README.md; run `hf-drafthead card {folder}`"]
    facts, card = read_facts(Path(folder)), read_card(path)
    lacks = []
    named, in_config = card.data.get("base_model"), facts.config.get("base_model_name_or_path")
    if not named and not facts.config.get("base_included"):
        lacks.append(f"base: the config names {in_config!r}, which others cannot load; name its id on the Hub")
    elif named and facts.base and facts.base != named:
        lacks.append(f"base: the card names {named!r}, the config {facts.base!r}; run `hf-drafthead card {folder}`")
    if not card.data.get("license"):
        lacks.append(f"license: run `hf-drafthead card {folder} --license ID`, such as apache-2.0")
    drafting = any(result.metric_type in METRICS for result in card.data.get("eval_results") or [])
    if not (drafting or "not measured" in card.text.lower()):
        lacks.append('measured figures: run `hf-drafthead bench`, or write "not measured" into the card')
    return lacks


def read_card(path: Path) -> ModelCard:
    """The card of a file; a ValueError where its metadata cannot be read."""
    try:
        return ModelCard.load(path)
    except OSError:
        raise
    except Exception as error:  # the YAML reader's own, which is no ValueError, among them
        raise ValueError(
            f"the metadata of {str(path)!r} cannot be read ({in_one_line(error)}): correct it, or remove it."
        ) from None


def card_data(facts: Facts, old: CardData, name: str, license: str | None) -> ModelCardData:
    """The metadata: what the facts determine, and of an earlier card's everything else."""
    old_fields = {key: value for key, value in old.__dict__.items() if value is not None}
    foreign = [result for result in old_fields.pop("eval_results", None) or [] if result.metric_type not in METRICS]
    name = old_fields.pop("model_name", name)  # a card that was published keeps the name of its results
    base = facts.base or old_fields.pop("base_model", None)
    base = None if isinstance(base, str) and not is_hub_id(base, facts.folder) else base
    tags = ["hf-drafthead", "speculative-decoding", "draft-heads", facts.family]
    named = facts.training.get("datasets") or facts.training.get("dataset") or []
    datasets = [without_folders(str(dataset)) for dataset in ([named] if isinstance(named, str) else named)]
    results = [*eval_results(facts), *foreign]
    data: dict[str, Any] = {
        "license": license or old_fields.pop("license", None) or facts.training.get("license"),
        "base_model": base,
        "base_model_relation": "adapter" if base else None,
        "library_name": "transformers",
        "pipeline_tag": TASK,
        "datasets": old_fields.pop("datasets", None) or datasets or None,
        "tags": [*tags, *(tag for tag in old_fields.pop("tags", []) if tag not in tags)],
        "eval_results": results or None,
        "model_name": name if results else None,
    }
    return ModelCardData(**data, **{key: value for key, value in old_fields.items() if key not in data})


def eval_results(facts: Facts) -> list[EvalResult]:
    """Tokens per step and speedup of every run, over all prompts and by task."""
    results = []
    for run in facts.runs:
        dataset = without_folders(str(run.get("dataset") or run.get("questions") or "prompts"))
        shown = Path(dataset).stem if Path(dataset).suffix in (".json", ".jsonl") else dataset
        of_all: dict[str, Any] = {"task_type": TASK, "task_name": "Text Generation", "dataset_split": run.get("split")}
        of_all["dataset_type"] = re.sub(r"[^\w./-]+", "-", dataset)
        of_all["dataset_name"] = shown + (f", first {run['limit']}" if run.get("limit") else "")
        measured = [(task, part, metric) for task, part in parts(run).items() for metric in METRICS]
        for task, part, metric in measured:
            if is_number(part.get(metric)):
                figure = {"metric_type": metric, "metric_value": round(part[metric], 4)}
                title = f"{METRICS[metric]} ({setting(run)})"
                results.append(EvalResult(**of_all, **figure, dataset_config=str(task), metric_name=title))
    return results


def parts(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A run's figures over all prompts, and by category; rows without a category are never called `all`."""
    split = {UNCATEGORISED if name == WHOLE else name: part for name, part in (run.get("per_category") or {}).items()}
    return {WHOLE: run, **({} if list(split) == [UNCATEGORISED] else split)}


def render(facts: Facts, data: ModelCardData, repo_id: str) -> str:
    """The card as the template has it."""
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.ChainableUndefined, keep_trailing_newline=True)
    filters = (cell, choice, counts_in_words, figure, is_exact, names, parts, setting, was_drafted)
    environment.filters |= {function.__name__: function for function in (*filters, without_folders)}
    family = FAMILIES[facts.family]
    included = facts.config.get("base_included")
    named = data.get("base_model") or (facts.base if included else facts.config.get("base_model_name_or_path"))
    named = named if not isinstance(named, str) or is_hub_id(named, facts.folder) else without_folders(named)
    file = None if included else facts.config.get("base_gguf_file")
    link = "a base that is included here" if included else "a base that is missing: the config names none"
    link = (f"`{named}`" if named else link) + (f" (its GGUF file `{without_folders(file)}`)" if file else "")
    kinds: dict[str, list[dict[str, Any]]] = {"same": [], "rounding": [], "fault": []}
    for run in [*filter(is_exact, facts.runs), *facts.verifications]:
        if isinstance(run.get("identical"), bool):
            kinds[exactness(run)].append(run)
    citations = [file.read_text(encoding="utf-8") for file in (CARD_FILES / "citations").iterdir()]
    return environment.from_string((CARD_FILES / "template.md.jinja").read_text(encoding="utf-8")).render(
        card_data=data.to_yaml(),
        facts=facts,
        name=repo_id.rpartition("/")[2],
        repo_id=repo_id,
        rebuilt=REBUILT,
        family_title=family.title,
        base_link=link,
        base_named=bool(named),
        license=data.get("license"),
        same=[run for run in kinds["same"] if was_drafted(run)],
        wrong=kinds["fault"],
        rounded=kinds["rounding"],
        nothing_drafted=bool(kinds["same"]),
        fewer=any((run.get("tokens_per_step") or 0) > 1 and (run.get("speedup") or 0) >= 1 for run in facts.runs),
        citation=next((text.strip() for text in citations if f"arXiv:{family.paper}" in text), f"arXiv:{family.paper}"),
    )


def setting(run: dict[str, Any]) -> str:
    """Device, dtype and batch size of a run, and how it chose its tokens, on one line."""
    acceptance, size, lossy = run.get("acceptance") or {}, run.get("batch_size"), not is_exact(run)
    copied, threshold = acceptance.get("prompt_lookup_num_tokens"), acceptance.get("posterior_threshold")
    parts = [
        *(str(run.get(name) or f"{name} not recorded") for name in ("device", "dtype")),
        "batch size not recorded" if size is None else f"batch size {size}",
        choice(run),
        lossy and f"{acceptance['acceptance']} acceptance",
        lossy and threshold is not None and f"threshold {threshold}",
        copied and f"{copied} copied tokens",
        run.get("complete") is False and f"not complete: {run.get('stopped') or 'stopped early'}",
    ]
    return ", ".join(part for part in parts if part)


def choice(run: dict[str, Any]) -> str:
    """How a run chose its tokens; empty if that is not recorded."""
    settings = run.get("settings") or {}
    sampled, heat = settings.get("do_sample"), settings.get("temperature")
    if not sampled:
        return "greedy" if sampled is False else ""
    return "sampled, temperature not recorded" if heat is None else f"temperature {heat}"


def names(runs: list[dict[str, Any]]) -> str:
    """What tells these runs from others, in one line."""
    shown = [("`hf-drafthead verify`, " if "checks" in run else "") + setting(run) for run in runs]
    return "; ".join(dict.fromkeys(shown))


def exactness(run: dict[str, Any]) -> str:
    """`same`, or what changed the text: `rounding` alone, or a `fault`."""
    if run["identical"]:
        return "same"
    counts = run.get("differences")
    return "rounding" if counts and not counts["faults"] else "fault"


def is_exact(run: dict[str, Any]) -> bool:
    """Whether a run was meant to give the base's own text."""
    return (run.get("acceptance") or {}).get("acceptance", "exact") == "exact"


def was_drafted(figures: dict[str, Any]) -> bool:
    """Whether the heads took part at all, in a run, in a part of one, or in every check of `verify`."""
    if "checks" not in figures:
        return figures.get("tokens_per_step", 1.0) is not None
    return all(check.get("undrafted_calls", 0) < check.get("calls", 1) for check in figures["checks"])


def cell(value: Any) -> str:
    """A value on one line of a table, without those inside it that are empty."""
    if value is None or type(value).__name__ == "ChainableUndefined":  # of jinja2: the facts do not hold it
        return "none" if value is None else "?"
    if isinstance(value, dict):
        return ", ".join(f"{name} {cell(part)}" for name, part in value.items() if part not in ([], {}, None))
    if isinstance(value, list):
        return "; ".join(map(cell, value))
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"
    return without_folders(" ".join(str(value).split())).replace("|", "\\|")


def without_folders(text: str) -> str:
    """A text in which absolute paths, which are of one machine only, are their last names.

    >>> without_folders("bench heads --base /home/me/base --json=~/out/a.json, see https://org/a/b")
    'bench heads --base base --json=a.json, see https://org/a/b'
    >>> without_folders(r"file:///home/me/base ~me/base C:\\Users\\me\\base")
    'base base base'
    """
    return PATH.sub("", text)


def figure(value: Any) -> str:
    """A measured number, or that there is none."""
    return f"{value:.2f}" if is_number(value) else "not measured"


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
