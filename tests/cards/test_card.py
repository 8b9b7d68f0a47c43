"""A card says what the files of a checkpoint say, and where they are silent it says so."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results
from safetensors.torch import load_file, save_file

from hf_drafthead import zoo
from hf_drafthead.cards import missing, write_card
from hf_drafthead.cards.facts import check_folder, read_facts
from hf_drafthead.evaluation.questions import UNCATEGORISED
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.modeling import families as table
from hf_drafthead.trees.entries import heads_hash
from tests.cards.checkpoints import TREE, put, run, write_checkpoint

FAMILIES = {
    "medusa": ({}, "Medusa", "cai2024medusa"),
    "hydra": ({}, "Hydra", "ankner2024hydra"),
    "hydra++": ({"prefix_layer": True}, "Hydra++", "ankner2024hydra"),
    "amphista": ({"num_auto_embedding_layers": 1}, "Amphista", "li2025amphista"),
    "amphista-alpha": ({"num_auto_embedding_layers": 2}, "Amphista-alpha", "li2025amphista"),
    "eagle": ({"num_draft_heads": 1}, "EAGLE", "li2024eagle"),
    "eagle3": ({"feature_layers": [0, 1, 2]}, "EAGLE-3", "li2025eagle3"),
    "peagle": ({"feature_layers": [0, 1]}, "P-EAGLE", "hui2026peagle"),
    "mtp": ({}, "MTP", "deepseekai2024deepseekv3"),
    "dflash": ({"feature_layers": [0, 1]}, "DFlash", "chen2026dflash"),
    "dflash2": ({"feature_layers": [0, 1], "conv_group_size": 8}, "DFlash 2", "chen2026dflash"),
    "dspark": ({"feature_layers": [0, 1], "markov_rank": 4}, "DSpark", "cheng2026dspark"),
    "gemma4-assistant": ({}, "Gemma 4 assistant", "du2024glide"),
    "lookup": ({}, "Prompt lookup", "yang2023inference"),
    "draft-model": ({"num_draft_heads": 1}, "Draft model", "leviathan2023fast"),
}


@pytest.fixture
def heads(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "vicuna-hydra")


def card_of(folder: Path, **options) -> ModelCard:
    return ModelCard.load(write_card(folder, **options))


def rows_of(card: ModelCard) -> dict[str, str]:
    """The cells of all tables of two columns."""
    cells = [line.strip("| ").split(" | ") for line in card.text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in cells if len(row) == 2}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_card_names_family_base_and_paper(tmp_path, name):
    fields, title, key = FAMILIES[name]
    kind = table.FAMILIES[name].model_class.config_class.model_type.removeprefix("drafthead_")
    folder = write_checkpoint(tmp_path / "heads", kind, **fields)
    card = card_of(folder)
    rows = rows_of(card)
    assert rows["family"] == title
    assert rows["base"] == "`org/base`"
    assert rows["base revision"] == "`0123456789abcdef0123456789abcdef01234567`"
    assert name in card.data.tags
    assert f"{{{key}," in card.text


def test_every_family_has_a_card_here():
    assert {*FAMILIES, "eagle3.1"} == set(table.FAMILIES)  # of which only the number is cited


def test_a_card_counts_what_the_heads_add_and_not_a_base_that_is_included(heads, tmp_path):
    rows = rows_of(card_of(heads))
    assert rows["parameters added"] == "320" and rows["draft heads"] == "3" and rows["`num_layers`"] == "2"
    assert "on disk (BF16)" in rows["memory added"]
    assert not {"`dtype`", "`transformers_version`", "`base_included`"} & set(rows)
    card = card_of(write_checkpoint(tmp_path / "heads", base_included=True))
    rows = rows_of(card)
    assert rows["base"] == "`org/base`, included here" and rows["parameters added"] == "320"
    assert "Base and heads come from this repository." in card.text


@pytest.mark.parametrize("name", [None, "/home/me/models/base", "../models/base", "./base"])
def test_an_included_base_without_a_name_on_the_hub_shows_no_path(tmp_path, name):
    folder = write_checkpoint(tmp_path / "heads", base_included=True, base_model_name_or_path=name)
    command = "hf-drafthead bench heads --base /home/me/models/base --json=~/models/e.json"
    put(folder, "evaluation.json", run(command=command, questions="/home/me/models/q.jsonl", base=name))
    put(folder, "training_summary.json", {"data": "/home/me/models/chats.jsonl", "datasets": ["/home/me/models/x"]})
    (folder / "README.md").write_text("---\nbase_model: /home/me/models/base\nbase_model_relation: adapter\n---\n")
    card = card_of(folder, license="mit")
    assert "models" not in str(card).replace("base_model", "").replace("the model classes", "")
    assert "Hydra draft heads for a base that is included here: with them" in card.text
    assert rows_of(card)["base"] == "included here; the config gives it no name on the Hub"
    assert "hf-drafthead bench heads --base base --json=e.json" in card.text
    assert rows_of(card)["data"] == "chats.jsonl"
    assert not {"base_model", "base_model_relation"} & set(card.data.to_dict())
    assert missing(folder) == []


def test_metadata_is_what_the_hub_reads(heads):
    put(heads, "training_summary.json", {"datasets": ["org/chats"]})
    data = card_of(heads, license="apache-2.0").data.to_dict()
    assert data == {
        "license": "apache-2.0",
        "base_model": "org/base",
        "base_model_relation": "adapter",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hf-drafthead", "speculative-decoding", "draft-heads", "hydra"],
        "datasets": ["org/chats"],
    }


def test_measured_figures_stand_in_the_text_and_in_the_model_index(heads):
    put(heads, "evaluation.json", run())
    card = card_of(heads, repo_id="org/vicuna-hydra")
    assert "**NVIDIA A100, float16, batch size 1**: 40 prompts of `mt_bench.jsonl`, 3,840 new tokens" in card.text
    assert "| all | 40 | 2.71 | 1.48 | yes |" in card.text
    assert "| writing | 20 | 2.50 | 1.30 | yes |" in card.text
    assert "| math | 20 | not measured | 1.70 | nothing drafted |" in card.text
    assert "over the base compiled: not measured; calls that the base decoded by itself: ?." in card.text
    assert "\nhf-drafthead bench heads --questions mt_bench.jsonl --json evaluation.json\n" in card.text
    assert "the output was the base's own, token by token" in card.text
    assert card.data.model_name == "vicuna-hydra"
    found = {(one.dataset_config, one.metric_type): one.metric_value for one in card.data.eval_results}
    assert found == {
        ("all", "tokens_per_step"): 2.713,
        ("all", "speedup"): 1.4815,
        ("writing", "tokens_per_step"): 2.5,
        ("writing", "speedup"): 1.3,
        ("math", "speedup"): 1.7,
    }
    assert {one.metric_name for one in card.data.eval_results} == {
        "Tokens per step (NVIDIA A100, float16, batch size 1)",
        "Speedup over the base (NVIDIA A100, float16, batch size 1)",
    }
    index = eval_results_to_model_index(card.data.model_name, card.data.eval_results)
    assert model_index_to_eval_results(index) == (card.data.model_name, card.data.eval_results)


def test_rows_without_a_category_do_not_take_the_place_of_the_whole(heads):
    part = {"prompts": 20, "identical": True, "speedup": 1.75}
    for name in ("all", UNCATEGORISED):  # the first is what these rows were once called
        split = {name: {**part, "tokens_per_step": 2.75}, "x": {**part, "tokens_per_step": 1.5}}
        put(heads, "evaluation.json", run(tokens_per_step=2.2, per_category=split))
        card = card_of(heads)
        found = {(one.dataset_config, one.metric_type): one.metric_value for one in card.data.eval_results}
        assert found["all", "tokens_per_step"] == 2.2 and found["uncategorised", "tokens_per_step"] == 2.75
        assert "| all | 40 | 2.20 | 1.48 | yes |\n| uncategorised | 20 | 2.75 | 1.75 | yes |" in card.text
    put(heads, "evaluation.json", run(per_category={UNCATEGORISED: {**part, "tokens_per_step": 2.713}}))
    card = card_of(heads)
    assert {one.dataset_config for one in card.data.eval_results} == {"all"} and "uncategorised" not in card.text


def test_calls_that_the_base_decoded_are_told_and_prove_nothing(heads):
    put(heads, "evaluation.json", run(undrafted=13, notices=["13 of 40 calls were decoded by the base itself."]))
    text = card_of(heads).text
    assert "calls that the base decoded by itself: 13." in text
    assert "\n- 13 of 40 calls were decoded by the base itself.\n" in text
    assert "the output was the base's own, token by token" in text
    part = {"prompts": 40, "identical": True, "tokens_per_step": None, "speedup": 1.0, "undrafted": 40}
    put(heads, "evaluation.json", run(**part, per_category={"x": part}))
    text = card_of(heads).text
    assert "| all | 40 | not measured | 1.00 | nothing drafted |" in text
    assert "the output was the base's own, token by token" not in text
    assert "### Exactness\n\nNot measured: the base decoded every call by itself, so nothing was drafted.\n" in text


def test_a_verification_in_which_nothing_was_drafted_proves_nothing(heads):
    check = {"name": "greedy", "texts": 4, "same": 4, "near_ties": 0, "different": 0, "calls": 4}
    for undrafted, claimed in ((0, True), (3, True), (4, False)):
        told = {"identical": True, "checks": [{**check, "undrafted_calls": undrafted}]}
        put(heads, "evaluation_verify.json", told)
        text = card_of(heads).text
        assert f"| greedy | 4 | 4 | 0 | 0 | {undrafted} |" in text
        assert ("the output was the base's own, token by token" in text) == claimed
    put(heads, "evaluation_verify.json", {"identical": True, "checks": [check, {**check, "undrafted_calls": 4}]})
    assert "the output was the base's own, token by token" not in card_of(heads).text


def test_what_was_cut_short_is_not_shown_as_whole(heads):
    notices = ["out of memory at a batch size of 4: 7 prompts were measured.", "compiled is left out: no | compiler."]
    put(heads, "evaluation.json", run(complete=False, stopped="out of memory", notices=notices))
    card = card_of(heads)
    assert "**NVIDIA A100, float16, batch size 1, not complete: out of memory**: 40 prompts" in card.text
    assert "\n- out of memory at a batch size of 4: 7 prompts were measured.\n" in card.text
    assert "- compiled is left out: no \\| compiler.\n" in card.text
    assert all("not complete: out of memory" in one.metric_name for one in card.data.eval_results)
    put(heads, "evaluation.json", run(complete=True, stopped="interrupted", notices=[]))
    assert "not complete" not in card_of(heads).text


def exactness_of(folder: Path) -> str:
    return card_of(folder).text.partition("### Exactness")[2].partition("## Training")[0].strip()


FAULT = "**The output differed from the base's own, although it should be identical: {}.**"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_difference_is_told_by_its_run(heads, dtype):
    sampled = {"do_sample": True, "temperature": 0.7}
    put(
        heads,
        "evaluation.json",
        [run(dtype=dtype, identical=False, settings=sampled), run(dtype="float32", batch_size=8)],
    )
    differed = FAULT.format(f"NVIDIA A100, {dtype}, batch size 1, temperature 0.7")
    same = "The same as the base's own, token by token: NVIDIA A100, float32, batch size 8."
    assert exactness_of(heads) == f"{differed}\n\n{same}"
    assert "| all | 40 | 2.71 | 1.48 | **no** |" in card_of(heads).text


def test_a_data_set_keeps_its_name_split_and_limit(heads):
    put(heads, "evaluation.json", run(questions="org/mt", split="test", limit=40))
    card = card_of(heads)
    assert "40 prompts of `org/mt`, split test, the first 40 questions, 3,840 new tokens" in card.text
    result = card.data.eval_results[0]
    assert (result.dataset_type, result.dataset_name, result.dataset_split) == ("org/mt", "org/mt, first 40", "test")
    put(heads, "evaluation.json", run())
    assert card_of(heads).data.eval_results[0].dataset_name == "mt_bench"


def hash_of(folder, dtype=None) -> str:
    return heads_hash(load_file(folder / "model.safetensors").items(), dtype)


def test_figures_of_other_heads_are_refused(heads):
    put(heads, "evaluation.json", run(heads_hash=hash_of(heads)))
    put(heads, "evaluation_verify.json", {"identical": True, "checks": [], "heads_hash": hash_of(heads)})
    card_of(heads)
    retrained = {name: tensor + 1 for name, tensor in load_file(heads / "model.safetensors").items()}
    save_file(retrained, heads / "model.safetensors")
    for name in ("evaluation.json", "evaluation_verify.json"):
        with pytest.raises(ValueError) as refused:
            write_card(heads)
        assert f"{name}' was measured with other heads (heads_hash " in str(refused.value)
        assert str(refused.value).endswith(f"({hash_of(heads)}): measure these, or remove the file.")
        (heads / name).unlink()
    write_card(heads)


def test_heads_that_were_measured_in_another_type_are_the_same(heads):
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) for name, shape in (("drafter.a", (3, 8)), ("drafter.b", (4,)))}
    save_file({**weights, "base.x": torch.ones(3)}, heads / "model.safetensors")
    stored = heads_hash(weights.items())
    half = heads_hash((name, weight.bfloat16()) for name, weight in weights.items())
    assert stored != half
    for found, dtype in ((stored, "float32"), (half, "bfloat16"), (stored, None)):
        put(heads, "evaluation.json", run(heads_hash=found, dtype=dtype))
        card_of(heads)
    put(heads, "evaluation.json", run(heads_hash=half, dtype="float32"))
    with pytest.raises(ValueError, match="was measured with other heads"):
        card_of(heads)


def test_every_run_of_every_file_is_told(heads):
    put(heads, "evaluation.json", {"rows": [run(), run(batch_size=8, speedup=1.1)]})
    put(heads, "evaluation_cpu.json", run(device="cpu", dtype="float32", command=None, speedup=float("inf")))
    card = card_of(heads)
    runs = [line.split(":")[0] for line in card.text.splitlines() if line.startswith("**")]
    assert runs == [
        "**NVIDIA A100, float16, batch size 1**",
        "**NVIDIA A100, float16, batch size 8**",
        "**cpu, float32, batch size 1**",
    ]
    assert card.text.count("The command was not recorded.") == 1
    assert all(one.metric_value < 3 for one in card.data.eval_results)


def test_a_lossy_run_is_marked_and_does_not_count_as_a_difference(heads):
    typical = {"acceptance": "typical", "posterior_threshold": 0.09}
    put(heads, "evaluation.json", [run(), run(identical=False, acceptance=typical, settings={"do_sample": True})])
    text = card_of(heads).text
    assert "**NVIDIA A100, float16, batch size 1, sampled, temperature not recorded, typical acceptance" in text
    assert ", threshold 0.09**" in text
    assert "the output was the base's own, token by token" in text
    assert "| all | 40 | 2.71 | 1.48 | yes |" in text and "| all | 40 | 2.71 | 1.48 | not asked for |" in text
    put(heads, "generation_config.json", {"draft_tree": TREE, "acceptance": "typical"})
    assert 'These heads are set to `acceptance="typical"`, which is lossy' in card_of(heads).text


NAMED = "`hf-drafthead verify`, cpu, bfloat16, batch size 4"
PARTED = "39 of 40 texts are the same, 1 differs from a near tie on (largest margin 0.125 in the logits"


@pytest.mark.parametrize(
    "same, near_ties, different, text",
    [
        (40, 0, 0, "In every exact run with draft heads the output was the base's own, token by token."),
        (39, 1, 0, f"Near ties that rounding decides changed some texts (see Limits): {NAMED}: {PARTED})."),
        (37, 1, 2, f"**The output differed from the base's own, although it should be identical: {NAMED}.**"),
    ],
)
def test_what_verify_found_is_told(heads, same, near_ties, different, text):
    check = {"name": "greedy, batch 4", "texts": 40, "same": same, "near_ties": near_ties, "different": different}
    check["largest_margin"] = 0.125 if near_ties else None
    counts = {"texts": 40, "rounding": near_ties, "faults": different, "largest_margin": check["largest_margin"]}
    verdict = {"device": "cpu", "dtype": "bfloat16", "batch_size": 4, "identical": same == 40, "checks": [check]}
    verdict["differences"] = counts
    put(heads, "evaluation_verify.json", {**verdict, "family": "hydra"})
    card = card_of(heads)
    assert f"{NAMED}:" in card.text
    assert f"| greedy, batch 4 | 40 | {same} | {near_ties} | {different} |" in card.text
    assert exactness_of(heads).startswith(text)
    assert ("token by token" in card.text) == (same == 40)
    assert "Tokens per step and speedup: not measured." in card.text
    assert card.data.eval_results is None


def test_a_run_in_which_rounding_decided_near_ties_says_how_many_and_by_how_little(heads):
    counts = {"texts": 40, "rounding": 5, "faults": 0, "largest_margin": 0.125}
    put(heads, "evaluation.json", run(identical=False, differences=counts))
    text = card_of(heads).text
    assert "| all | 40 | 2.71 | 1.48 | rounding (5 of 40) |" in text
    assert "35 of 40 texts are the same, 5 differ from a near tie on (largest margin 0.125 in the logits)" in text
    put(heads, "evaluation.json", run(identical=False, differences={**counts, "faults": 1}))
    text = card_of(heads).text
    assert "| all | 40 | 2.71 | 1.48 | **no** |" in text and "**The output differed from the base's own," in text


def test_missing_facts_are_shown_as_missing(tmp_path):
    folder = write_checkpoint(tmp_path / "bare", base_model_name_or_path=None, base_model_revision=None)
    (folder / "generation_config.json").unlink()
    card = card_of(folder)
    rows = rows_of(card)
    assert rows["base"] == "a base that is missing: the config names none"
    assert rows["base revision"] == "not recorded"
    assert rows["license"].startswith("missing")
    for line in (
        "Tokens per step and speedup: not measured. `hf-drafthead bench` measures them.",
        "Data and recipe: missing, there is no `training_summary.json`.",
        "Missing: `generation_config.json` names no tree.",
        "### Exactness\n\nNot measured here;",
    ):
        assert line in card.text
    assert not {"base_model", "base_model_relation"} & set(card.data.to_dict())


def test_how_other_tools_load_the_heads_is_told_where_a_file_for_them_is_there(heads, tmp_path):
    model = "modeling_drafthead.HydraForCausalLM"
    folder = write_checkpoint(tmp_path / "with-code", auto_map={"AutoModelForCausalLM": model})
    assert "load these heads with `trust_remote_code=True`" in card_of(folder, repo_id="org/name").text
    assert "trust_remote_code" not in card_of(heads).text


def test_the_intro_claims_no_more_than_was_measured(heads):
    claim = "with them `generate` needs fewer forward passes of the base"
    purpose = "The purpose of such heads is that `generate` needs fewer forward passes of the base."
    slow = run(speedup=0.95)  # fewer passes, and more time
    for rows, measured in (([], False), ([run()], True), ([run(tokens_per_step=1.0)], False), ([slow], False)):
        put(heads, "evaluation.json", rows)
        text = card_of(heads).text
        assert (claim in text, purpose in text) == (measured, not measured)


def test_the_tree_is_drawn_and_named(heads):
    text = card_of(heads).text
    assert "A step checks 7 nodes at once" in text
    assert DraftTree(TREE).draw() in text
    put(heads, "generation_config.json", {"draft_tree": "mc_sim_7b_63"})
    text = card_of(heads).text
    assert "3 guesses deep (the published tree `mc_sim_7b_63`); each line" in text
    assert DraftTree(TREE).draw() not in text
    put(heads, "generation_config.json", {"draft_tree": "dynamic"})
    assert "every step builds its own tree" in card_of(heads).text


def test_calibrated_trees_are_listed(heads):
    def entry(size, tree, **more):
        key = {
            "device": "cpu",
            "dtype": "float16",
            "batch_size": size,
            "execution": "compiled" if size > 4 else "eager",
        }
        return {**key, "tree": tree, **more}

    entries = [entry(1, [[0], [1]]), entry(2, [[0], [0, 0]], lookup=8), entry(8, [[1], [0]])]
    put(heads, "generation_config.json", {"draft_tree": TREE, "calibration": entries})
    text = card_of(heads).text
    assert "| cpu | float16 | 1 | eager | 3 |" in text and "| cpu | float16 | 2 | eager | 3, 8 copied tokens |" in text


def test_the_same_facts_give_the_same_bytes(heads):
    put(heads, "evaluation.json", run())
    put(heads, "training_summary.json", {"head0_top1": 0.25, "seed": 0})
    write_card(heads, license="mit", repo_id="org/one")
    first = (heads / "README.md").read_bytes()
    write_card(heads, repo_id="org/one")
    assert (heads / "README.md").read_bytes() == first


def test_what_a_person_wrote_survives_in_text_and_metadata(heads):
    foreign = EvalResult("text-generation", "org/other", "Other", "rouge", 0.5)
    card = card_of(heads, license="mit")
    card.data.language, card.data.tags = "en", [*card.data.tags, "mine"]
    card.data.eval_results, card.data.model_name = [foreign], "published"
    card.text = card.text.replace("## Limits", "## Thanks\n\nTo all.\n\n## Limits")
    card.save(heads / "README.md")
    put(heads, "evaluation.json", run())
    again = card_of(heads)
    assert "## Thanks\n\nTo all.\n\n## Limits" in again.text and "| all | 40 | 2.71 | 1.48 | yes |" in again.text
    data = again.data
    assert (data.license, data.language, data.tags[-1], data.model_name) == ("mit", "en", "mine", "published")
    assert foreign in data.eval_results and len(data.eval_results) == 6


def test_the_base_that_a_person_named_stays_where_the_config_has_a_path(tmp_path):
    folder = write_checkpoint(tmp_path / "heads", base_model_name_or_path="../base")
    (folder / "README.md").write_text("---\nbase_model: org/published\n---\n\n# Mine\n\nBy hand.\n")
    card = card_of(folder)
    assert card.data.base_model == "org/published"
    assert card.text.startswith("\n# Mine\n\nBy hand.\n\n## Use")


@pytest.mark.parametrize("name", zoo.families())
def test_cards_of_the_zoo_are_whole_and_read_back_the_same(name, tmp_path):
    shutil.copytree(zoo.path(name), tmp_path / name)
    shutil.copytree(zoo.path("base"), tmp_path / "base")
    path = write_card(tmp_path / name)
    card = ModelCard.load(path)
    assert str(card) == path.read_text()
    assert ModelCard(str(card)).data.to_dict() == card.data.to_dict()
    assert card.data.library_name == "transformers" and card.data.license == "apache-2.0"
    assert {result.metric_type for result in card.data.eval_results} == {"tokens_per_step", "speedup"}
    assert re.search("head0[ _]top1", card.text)
    assert "python -m hf_drafthead.zoo.build" in card.text
    assert [one.partition(":")[0] for one in missing(tmp_path / name)] == ["base"]


def test_missing_says_what_a_card_lacks_and_what_to_do(tmp_path):
    folder = write_checkpoint(tmp_path / "heads", base_model_name_or_path="../base")
    assert missing(folder) == [f"card: there is no README.md; run `hf-drafthead card {folder}`"]
    write_card(folder)
    assert [one.partition(":")[0] for one in missing(folder)] == ["base", "license"]
    write_checkpoint(folder)
    write_card(folder, license="mit")
    assert missing(folder) == []
    write_checkpoint(folder, base_model_name_or_path="org/another")
    another = f"base: the card names 'org/base', the config 'org/another'; run `hf-drafthead card {folder}`"
    assert missing(folder) == [another]
    write_checkpoint(folder)
    figures = 'measured figures: run `hf-drafthead bench`, or write "not measured" into the card'
    for words, lacks in (("", [figures]), ("\nNot measured.\n", [])):
        (folder / "README.md").write_text(f"---\nbase_model: org/base\nlicense: mit\n---\n\n# Mine\n{words}")
        assert missing(folder) == lacks


@pytest.mark.parametrize(
    "name, text, error, message",
    [
        ("config.json", "{", OSError, "is not readable JSON"),
        ("config.json", '{"model_type": "llama"}', ValueError, "holds a 'llama' model without draft heads"),
        ("training_summary.json", "[]", OSError, r"it holds \[\], expected an object"),
        ("evaluation.json", '{"loss": 3}', ValueError, "holds no figures: expected what `hf-drafthead bench --json`"),
        ("evaluation.json", '{"speedup": 3, "family": "eagle"}', ValueError, "measured with 'eagle' heads, but"),
        ("model.safetensors", "pickle", OSError, "is not a readable safetensors file"),
        ("generation_config.json", '{"draft_tree": [[0, 0]]}', ValueError, r"node \(0, 0\) has no parent"),
        ("README.md", "---\na: [\n---\n", ValueError, "the metadata of .* cannot be read"),
        ("README.md", "---\n- a\n---\n", ValueError, "the metadata of .* cannot be read"),
    ],
)
def test_damaged_files_are_refused_in_one_line(heads, name, text, error, message):
    (heads / name).write_text(text)
    with pytest.raises(error, match=message) as caught:
        write_card(heads)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    for what in (write_card, read_facts):
        with pytest.raises(
            OSError, match="is no draft-head checkpoint .there is no config.json, or it is empty.: give the folder of"
        ):
            what(tmp_path)
    with pytest.raises(OSError, match="there is no folder 'org/heads': give"):
        check_folder(Path("org/heads"))
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match="save the model there again"):
        write_card(tmp_path)


CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("kept_in", ["config", "file", None])
def test_the_snippet_asks_a_chat_model_through_its_template(heads, kept_in):
    put(heads, "tokenizer_config.json", {"chat_template": "{{ messages }}"} if kept_in == "config" else {})
    if kept_in == "file":
        (heads / "chat_template.jinja").write_text("{{ messages }}")
    snippets = CODE.findall(card_of(heads).text)
    assert snippets
    for snippet in snippets:
        compile(snippet, "card", "exec")
        assert ("tokenizer.apply_chat_template(messages, add_generation_prompt=True" in snippet) == bool(kept_in)
        assert ('tokenizer("Once upon a time"' in snippet) == (not kept_in)
        assert 'output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True' in snippet


def test_the_training_is_told_in_words_with_as_many_digits_as_a_person_reads(heads):
    report = {"rows": 10_000, "kept": 9, "refusals": [], "mapped": {"gpt -> assistant": 4}, "cut": 0}
    numbers = {"eval_loss": 2.0123456789012345, "rate": 0.0005, "seconds": 12345.678, "tokens_per_step": 2.2}
    told = {"data_report": report, "held_out": {"head0_top1": 0.25, "head0_top5": 0.375}, "base": "x", "seed": 4}
    put(heads, "training_summary.json", {"schedule": "cosine", **told, **numbers})
    card = card_of(heads)
    rows = rows_of(card)
    assert (rows["eval loss"], rows["rate"], rows["seconds"], rows["seed"]) == ("2.012", "0.0005", "12345.7", "4")
    assert rows["data report"] == "rows 10,000, kept 9, mapped gpt -> assistant 4, cut 0"
    assert rows["held out"] == "head0_top1 0.25, head0_top5 0.375" and rows["expected tokens per step"] == "2.2"
    assert "refusals" not in card.text and "SchedulerType" not in card.text
