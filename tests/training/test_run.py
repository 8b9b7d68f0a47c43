"""`train_heads`: from a base and some text to a folder that loads, with what it needs to be trusted."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_drafthead import MedusaForCausalLM, zoo
from hf_drafthead.modeling import families
from hf_drafthead.modeling.files import edit_json, read_json
from hf_drafthead.training.arguments import DraftHeadTrainingArguments
from hf_drafthead.training.data import read_data
from hf_drafthead.training.distill import distill
from hf_drafthead.training.examples import PreparedData, own_prompts
from hf_drafthead.training.expected_tokens_per_step import ExpectedTokensPerStep
from hf_drafthead.training.record import SUMMARY, save_whole, whole_checkpoint
from hf_drafthead.training.run import train_heads
from hf_drafthead.training.trainer import DraftHeadTrainer
from hf_drafthead.trees import calibrate
from tests.bases import tiny_base
from tests.families import FAMILIES
from tests.training.chat_templates import CHATML
from tests.training.test_trainer import ROWS, trainer_of, weights

QUICK = {
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "held_out_rows": 3,
    "answer_tokens": 8,
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
}


def written_place(folder, dtypes=("float32",), **sizes):
    """A folder with tiny bases (`base`, others by their type) that have the zoo's tokenizer, and some texts."""
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("base"))
    for dtype in dtypes:
        name = "base" if dtype == "float32" else dtype
        base = tiny_base(dtype=getattr(torch, dtype), vocab_size=len(tokenizer), max_position_embeddings=128, **sizes)
        base.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    texts = [f"def function_{number}(a, b):\n    return a * {number} + b\n" for number in range(24)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return written_place(tmp_path_factory.mktemp("run"))


def train(place, output, family="medusa", **arguments):
    return train_heads(str(place / "base"), family, str(place / "texts.jsonl"), output, **{**QUICK, **arguments})


def test_a_tree_is_calibrated_at_the_end_where_it_is_asked_for(place, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "PAIRS", 2)
    monkeypatch.setattr(calibrate, "TIMED_TOKENS", 5)
    monkeypatch.setattr(calibrate, "LEAST_POSITIONS", 9)
    trained = train(place, tmp_path / "heads", calibrate_tree=True, answer_tokens=16, answer_temperature=0.7)
    (entry,) = trained.model.generation_config.calibration
    loaded = AutoModel.from_pretrained(tmp_path / "heads")
    prompts = own_prompts([{"input_ids": ids, "labels": ids} for ids in held_out_rows(place)], 3, 100)
    expected = ExpectedTokensPerStep(prompts, 16, temperature=0.7)(loaded)
    assert trained.summary["tokens_per_step"] == pytest.approx(expected)
    assert trained.summary["answer_temperature"] == entry["measured"]["temperature"] == 0.7
    assert loaded.generation_config.calibration == [entry] and entry["batch_size"] == 1
    nodes = set()
    note = lambda record: nodes.add(record.drafted if record.step else 0)  # noqa: E731
    loaded.generate(torch.full((1, 4), 70), max_new_tokens=6, on_step=note)
    alone = set() if entry["tree"] else {1}  # copies are drafted where some match
    sizes = {max(len(entry["tree"]), entry["lookup"]) + 1} | alone
    assert 0 in nodes and set() < nodes - {0} <= sizes


def test_a_training_without_enough_text_to_calibrate_on_is_saved_all_the_same(place, tmp_path, caplog):
    trained = train(place, tmp_path / "heads", calibrate_tree=True)
    assert "no tree was calibrated: " in caplog.text and "prompts are too few" in caplog.text
    assert (tmp_path / "heads" / "model.safetensors").is_file()
    assert not getattr(trained.model.generation_config, "calibration", None)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", list(families.TRAINED))
def test_every_family_trains_saves_and_loads(family, place, tmp_path):
    fields = {"feature_layers": [0, 1], "draft_vocab_size": 200} if family.startswith(("eagle3", "peagle")) else {}
    trained = train(place, tmp_path / "heads", family, fields=fields)
    files = {file.name for file in (tmp_path / "heads").iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= files
    loaded = AutoModel.from_pretrained(tmp_path / "heads")
    for name, tensor in weights(trained.model.drafter).items():
        assert torch.equal(weights(loaded.drafter)[name], tensor)
    stored = {name for file in (tmp_path / "heads").rglob("*.safetensors") for name in load_file(file)}
    assert stored <= {f"drafter.{name}" for name in loaded.drafter.state_dict()}  # no hidden states of the base
    summary = json.loads((tmp_path / "heads" / "training_summary.json").read_text())
    assert {"command", "torch", "transformers", "hf_drafthead", "hardware", "hours", "seed"} <= set(summary)
    assert summary["family"] == family and summary["steps"] == 4 and len(summary["data_sha256"]) == 64
    assert summary["data_report"]["rows"] == 24 and 0 <= summary["held_out"]["head0_top1"] <= 1
    assert summary["learning_rate"] == families.FAMILIES[family].recipe["learning_rate"]
    assert summary["schedule"] == families.FAMILIES[family].recipe["lr_scheduler_type"]
    prompts = own_prompts([{"input_ids": ids, "labels": ids} for ids in held_out_rows(place)], 3, 100)
    assert summary["tokens_per_step"] == pytest.approx(ExpectedTokensPerStep(prompts, 8)(loaded))
    if family.startswith(("eagle3", "peagle")):
        counts = torch.bincount(torch.cat([torch.as_tensor(ids) for ids in token_rows(place)[3:]]), minlength=1024)
        tokens = loaded.drafter.draft_tokens
        assert len(tokens) == 200 and torch.equal(tokens, tokens.unique())
        assert summary["draft_vocab_coverage"] == pytest.approx((counts[tokens].sum() / counts.sum()).item()) == 1.0


def held_out_rows(place):
    return token_rows(place)[:3]


def token_rows(place):
    tokenizer = AutoTokenizer.from_pretrained(place / "base")
    texts = [json.loads(line)["text"] for line in (place / "texts.jsonl").read_text().splitlines()]
    return [tokenizer(text).input_ids for text in texts]


def test_data_in_hand_is_learnt_from_as_its_file_is(place, tmp_path):
    """A data set of texts, rows of tokens in a list, and such rows in the format of another library."""
    texts = Dataset.from_json(str(place / "texts.jsonl"), cache_dir=str(tmp_path / "cache"))
    rows = [{"input_ids": row, "labels": row} for row in map(torch.tensor, token_rows(place))]
    pandas = Dataset.from_list([{"input_ids": row, "labels": row} for row in token_rows(place)]).with_format("pandas")
    ready = [PreparedData(rows[3:], rows[:3], "some functions", "0" * 64)]
    ready += [PreparedData(pandas.select(range(3, len(rows))), pandas.select(range(3)), "some functions", "0" * 64)]
    from_file = train(place, tmp_path / "file")
    for number, data in enumerate([texts, *ready]):
        trained = train_heads(str(place / "base"), "medusa", data, tmp_path / str(number), **QUICK)
        for name, tensor in weights(from_file.model.drafter).items():
            assert torch.equal(weights(trained.model.drafter)[name], tensor)
        assert trained.summary["tokens_per_step"] == from_file.summary["tokens_per_step"] > 0
        if number == 0:
            assert trained.summary["data_sha256"] == from_file.summary["data_sha256"]
        else:
            assert trained.summary["data"] == "some functions" and trained.summary["data_report"] is None
    beyond = [{"input_ids": [3, 9999], "labels": [-100, 3]}]
    unlabelled = [{**row, "labels": row["labels"] * 0 - 100} for row in rows]
    for wrong, line in (
        (beyond, "row 0 has the token 9999, but the base's vocabulary"),
        (unlabelled, "none of the 24"),
    ):
        data = PreparedData(wrong, rows[:3], "some functions", "0" * 64)
        with pytest.raises(ValueError, match=line):
            train_heads(str(place / "base"), "medusa", data, tmp_path / "wrong", **QUICK)
    with pytest.raises(ValueError, match="the data is a IterableDataset: give a file, a name, or a datasets.Dataset."):
        train_heads(str(place / "base"), "medusa", texts.to_iterable_dataset(), tmp_path / "stream", **QUICK)


def test_a_base_that_learnt_is_saved_with_its_heads(place, tmp_path):
    trained = train(place, tmp_path / "both", joint=True, lora_rank=4, base_learning_rate=0.05)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "both")
    assert loaded.config.base_included
    before = AutoModelForCausalLM.from_pretrained(place / "base")
    with torch.no_grad():
        after = loaded.base(ROWS).logits
        torch.testing.assert_close(after, trained.model.base(ROWS).logits)
        assert not torch.allclose(after, before(ROWS).logits, atol=1e-3)
    expected = loaded.base.generate(ROWS[:1, :6], max_new_tokens=10, do_sample=False)
    assert torch.equal(loaded.generate(ROWS[:1, :6], max_new_tokens=10, do_sample=False), expected)


def test_trained_heads_can_be_trained_on(place, tmp_path):
    first = train(place, tmp_path / "first")
    start = weights(first.model.drafter)
    bundled = read_json(zoo.ASSETS / "medusa" / "generation_config.json")
    edit_json(tmp_path / "first" / "generation_config.json", calibration=bundled["calibration"])
    second = train(place, tmp_path / "second", heads=str(tmp_path / "first"), learning_rate=1e-12)
    assert "calibration" not in read_json(tmp_path / "second" / "generation_config.json")  # it was of the first
    for name, tensor in weights(second.model.drafter).items():
        torch.testing.assert_close(tensor, start[name])


@pytest.fixture
def steps_taken(monkeypatch):
    """The numbers of the steps that were really taken, not loaded."""
    taken = []
    step = DraftHeadTrainer.training_step

    def counted(self, *args, **kwargs):
        taken.append(self.state.global_step + 1)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(DraftHeadTrainer, "training_step", counted)
    return taken


def test_an_interrupted_run_goes_on_bit_for_bit(place, tmp_path, steps_taken):
    whole = train(place, tmp_path / "whole")
    settings = {"save_steps": 2, "eval_strategy": "no", "max_steps": 4}
    stopped = train(place, tmp_path / "parts", **settings)
    for name in ("checkpoint-4", "model.safetensors"):
        path = tmp_path / "parts" / name
        subprocess.run(["rm", "-r", str(path)], check=True)
    (tmp_path / "parts" / "checkpoint-3").mkdir()  # torn: killed while it was written
    steps_taken.clear()
    told = []
    resumed = train(place, tmp_path / "parts", resume=True, tell=told.append, **settings)
    assert steps_taken == [3, 4] and told[-1] == "resuming from step 2 of 4"
    for name, tensor in weights(whole.model.drafter).items():
        assert torch.equal(weights(resumed.model.drafter)[name], tensor), name
        assert torch.equal(weights(stopped.model.drafter)[name], tensor), name


def test_what_had_come_to_its_end_is_only_loaded(place, tmp_path, steps_taken):
    settings = {"save_steps": 2, "lr_scheduler_type": "constant"}
    done = train(place, tmp_path / "run", "hydra++", **settings)
    (tmp_path / "run" / "model.safetensors").unlink()  # killed while it was saved
    (tmp_path / "run" / "clock.json").write_text('{"seconds": 7200.0}')
    steps_taken.clear()
    again = train(place, tmp_path / "run", "hydra++", resume=True, **settings)
    assert steps_taken == [] and again.summary["steps"] == 4
    assert again.summary["train_loss"] == done.summary["train_loss"]
    assert again.summary["hours"] == 2.0
    for name, tensor in weights(done.model.drafter).items():
        assert torch.equal(weights(again.model.drafter)[name], tensor), name
    assert (tmp_path / "run" / "model.safetensors").is_file()
    (tmp_path / "run" / "clock.json").write_text('{"seconds": 72')
    with pytest.raises(OSError, match="clock.json' is not readable JSON"):
        train(place, tmp_path / "run", "hydra++", resume=True, **settings)


def test_going_on_with_something_else_is_refused(place, tmp_path):
    other = tiny_base(seed=1, dtype=torch.float32, vocab_size=1024, max_position_embeddings=128)
    touched = AutoModelForCausalLM.from_pretrained(place / "base")
    with torch.no_grad():
        touched.model.layers[0].mlp.up_proj.weight.add_(0.01)
    for name, model in (("other", other), ("touched", touched)):
        model.save_pretrained(place / name)
        AutoTokenizer.from_pretrained(place / "base").save_pretrained(place / name)
    rows = (place / "texts.jsonl").read_text().splitlines()
    (place / "other.jsonl").write_text("\n".join(rows[1:]))
    settings = {**QUICK, "max_steps": 2, "save_steps": 1, "eval_strategy": "no"}

    def run(resume, base="base", family="medusa", data="texts.jsonl", **more):
        more = {**settings, **more, "resume": resume}
        train_heads(str(place / base), family, str(place / data), tmp_path / "run", **more)

    run(False)
    for changed, line in (
        ({"family": "hydra"}, "family='medusa', but now family='hydra': use the same setting, or give another output"),
        ({"fields": {"num_draft_heads": 3}}, "config=.* but now config="),
        ({"data": "other.jsonl"}, "data='[0-9a-f]{64}', but now"),
        ({"base": "other"}, "base='[0-9a-f]{16}', but now"),
        ({"base": "touched"}, "base='[0-9a-f]{16}', but now"),
        ({"max_length": 40}, "max_length=128, but now max_length=40"),
        ({"held_out_rows": 4}, "held_out_rows=3, but now held_out_rows=4"),
        ({"seed": 1}, "seed=42, but now seed=1"),
        ({"optim": "sgd"}, "optim='adamw_torch_fused', but now optim='sgd'"),
        ({"chat_template": CHATML}, "chat_template='[0-9a-f]{64}', but now"),
    ):
        with pytest.raises(ValueError, match=f"run' was started with {line}"):
            run(True, **changed)
    edit_json(tmp_path / "run" / "run.json", hf_drafthead="0.0.9", optim=None, streaming=True)  # which it did not know
    with pytest.raises(
        ValueError, match=r"streaming=True, but now streaming=None: go on with its version of hf_drafthead .0.0.9"
    ):
        run(True)
    with pytest.raises(ValueError, match=r"holds checkpoints of an earlier training \(checkpoint-2\): continue"):
        run(False)


@pytest.mark.parametrize("lost", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_checkpoint_without_the_state_of_the_training_is_not_resumed_from(lost, place, tmp_path):
    """Rate, moments and random numbers would begin anew."""
    settings = {"save_steps": 2, "eval_strategy": "no"}
    train(place, tmp_path / "run", **settings)
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    (tmp_path / "run" / "checkpoint-2" / lost).unlink()
    name = {"rng_state.pth": "random"}.get(lost, lost.removesuffix(".pt"))
    with pytest.raises(ValueError, match=f"checkpoint-2' holds no {name} state, as with save_only_model, so that"):
        train(place, tmp_path / "run", resume=True, **settings)


def test_checkpoints_of_weights_alone_are_loaded_where_the_training_was_finished(place, tmp_path, steps_taken):
    settings = {"save_steps": 2, "eval_strategy": "no", "save_only_model": True}
    said = []
    train(place, tmp_path / "run", tell=said.append, **settings)
    assert any("cannot be resumed from them" in line for line in said)
    steps_taken.clear()
    assert train(place, tmp_path / "run", resume=True, **settings).summary["steps"] == 4 and steps_taken == []
    with pytest.raises(ValueError, match="checkpoint-4' holds no optimizer, scheduler, random state"):
        train(place, tmp_path / "run", resume=True, **settings, max_steps=6)


@pytest.mark.parametrize("of", ["loss", "gradient"])
def test_what_is_no_number_stops_before_the_weights(of, tmp_path):
    model = FAMILIES[0].build(tiny_base(dtype=torch.float32))
    trainer = trainer_of(model, tmp_path, max_steps=6, save_strategy="steps", save_steps=1)
    if of == "gradient":
        parameter = next(model.drafter.parameters())
        parameter.register_hook(lambda grad: grad * float("nan") if trainer.state.global_step == 3 else grad)
    else:
        embeddings, read = model.base.get_input_embeddings().weight.data, trainer.get_batch_samples
        spoil = lambda: embeddings.fill_(float("nan")) if trainer.state.global_step == 3 else None  # noqa: E731
        trainer.get_batch_samples = lambda *given: (spoil(), read(*given))[1]
    with pytest.raises(FloatingPointError, match=r"the gradient became nan in step 4: .*checkpoint-3 is complete"):
        trainer.train()
    assert all(torch.isfinite(tensor).all() for tensor in weights(model.drafter).values())


TORN = ["trainer_state.json", "config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"]


@pytest.mark.few(7)
@pytest.mark.parametrize("damage", [*TORN, "no number"])
def test_a_torn_checkpoint_or_one_of_what_is_no_number_is_passed_over(damage, tmp_path):
    model = FAMILIES[0].build(tiny_base(dtype=torch.float32))
    trainer_of(model, tmp_path, max_steps=4, save_strategy="steps", save_steps=2).train()
    assert whole_checkpoint(tmp_path).name == "checkpoint-4"
    file = tmp_path / "checkpoint-4" / ("model.safetensors" if damage == "no number" else damage)
    if damage == "no number":
        tensors = load_file(file)
        next(iter(tensors.values())).view(-1)[0] = float("nan")
        save_file(tensors, file)
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert whole_checkpoint(tmp_path).name == "checkpoint-2"


def test_a_save_that_fails_leaves_what_was_there(place, tmp_path, monkeypatch):
    model = FAMILIES[0].build(tiny_base(dtype=torch.float32))
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("base"))
    save_whole(model, tokenizer, tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenizer, "save_pretrained", full)
    with torch.no_grad():
        next(model.drafter.parameters()).add_(1.0)
    with pytest.raises(OSError, match="No space left"):
        save_whole(model, tokenizer, tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_disk_that_fills_up_costs_the_steps_since_the_last_checkpoint(place, tmp_path, monkeypatch, steps_taken):
    save = torch.save

    def full(value, place, *args, **kwargs):
        if "checkpoint-3" in str(place):
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
        return save(value, place, *args, **kwargs)

    settings = {"max_steps": 4, "save_steps": 1, "eval_strategy": "no"}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(OSError, match=r"run' cannot be written \(RuntimeError: .* pos 64 vs 0\): what was there"):
            train(place, tmp_path / "run", **settings)
    steps_taken.clear()
    assert train(place, tmp_path / "run", resume=True, **settings).summary["steps"] == 4 and steps_taken == [3, 4]


@pytest.mark.slow
def test_a_killed_training_can_be_resumed(place, tmp_path, steps_taken):
    script = (
        "from tests.training.test_run import *\n"
        f"train(Path({str(place)!r}), Path({str(tmp_path / 'run')!r}), max_steps=2000, save_steps=1,"
        " eval_strategy='no', save_total_limit=3, lr_scheduler_type='constant')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and len(list((tmp_path / "run").glob("checkpoint-*"))) < 3:
        assert process.poll() is None, process.stderr.read()[-2000:]
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    last = int(whole_checkpoint(tmp_path / "run").name.removeprefix("checkpoint-"))
    settings = {"save_steps": 1, "eval_strategy": "no", "save_total_limit": 3, "lr_scheduler_type": "constant"}
    resumed = train(place, tmp_path / "run", resume=True, max_steps=last + 2, **settings)
    assert steps_taken == [last + 1, last + 2] and resumed.summary["steps"] == last + 2


@pytest.mark.parametrize(("rows", "held_out"), [(2, 1), (19, 1), (20, 2), (639, 63), (640, 64), (900, 64)])
def test_a_tenth_of_the_rows_is_held_out(place, tmp_path, rows, held_out):
    model = MedusaForCausalLM.from_base(str(place / "base"), num_draft_heads=1)
    tokenizer = AutoTokenizer.from_pretrained(place / "base")
    data = Dataset.from_list([{"text": f"abc defg {row}"} for row in range(rows)])
    settings = DraftHeadTrainingArguments.for_family("medusa", str(tmp_path), use_cpu=True)
    found = read_data(model, tokenizer, data, settings)
    assert (len(found.held_out), len(list(found.rows))) == (held_out, rows - held_out)


def test_heads_are_trained_further_on_the_commit_that_they_name(place, tmp_path, monkeypatch):
    MedusaForCausalLM.from_base(str(place / "base"), num_draft_heads=2).save_pretrained(tmp_path / "heads")
    name = str(place / "base")
    edit_json(tmp_path / "heads" / "config.json", base_model_name_or_path=name, base_model_revision="c" * 40)
    load, asked = MedusaForCausalLM.from_pretrained, []
    monkeypatch.setattr(
        MedusaForCausalLM, "from_pretrained", lambda *given, **how: asked.append(how) or load(*given, **how)
    )
    for base in (name, f"{name}/"):
        train_heads(base, "medusa", place / "texts.jsonl", tmp_path / "new", heads=tmp_path / "heads", dry_run=True)
    assert [how["base_revision"] for how in asked] == ["c" * 40, None]


def test_bad_input(place, tmp_path):
    with pytest.raises(TypeError, match="learning_rat"):
        train(place, tmp_path / "g", learning_rat=1e-3)
    with pytest.raises(ValueError, match="the data holds 24 rows, of which 24 are to be held out: give more data, or"):
        train(place, tmp_path / "a", held_out_rows=24)
    with pytest.raises(ValueError, match="holds no complete checkpoint to resume from: leave --resume out"):
        train(place, tmp_path / "c", resume=True)
    with pytest.raises(ValueError, match="num_draft_heads cannot be set for trained heads"):
        train(place, tmp_path / "d", heads=str(tmp_path), fields={"num_draft_heads": 2})
    with pytest.raises(ValueError, match="have no label .* tokens ahead: give longer rows, or train fewer heads"):
        train(place, tmp_path / "e", fields={"num_draft_heads": 64})
    train(place, tmp_path / "hydra", "hydra")
    with pytest.raises(ValueError, match=r"are 'hydra' heads, not 'hydra\+\+' ones: give --family hydra\."):
        train(place, tmp_path / "g", "hydra++", heads=str(tmp_path / "hydra"))
    before = (place / "base" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="is the folder of a model without heads: give another --output"):
        train(place, place / "base")
    assert (place / "base" / "model.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match="lies in the folder of the data"):
        train_heads(str(place / "base"), "medusa", str(tmp_path / "hydra"), tmp_path / "hydra" / "heads", **QUICK)
    with pytest.raises(ValueError, match="the heads choose among 3 tokens: give a draft_vocab_size of at least 10"):
        train(place, tmp_path / "h", fields={"draft_vocab_size": 3})


def test_chats_are_written_by_the_template_that_was_given_and_saved(place, tmp_path):
    sharegpt = [[{"from": "human", "value": f"question {n}"}, {"from": "gpt", "value": "a"}] for n in range(9)]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"conversations": chat}) for chat in sharegpt))
    given = (str(place / "base"), "medusa", str(tmp_path / "chats.jsonl"))
    with pytest.raises(ValueError, match="chat template"):
        train_heads(*given, tmp_path / "none", **QUICK)
    trained = train_heads(*given, tmp_path / "heads", chat_template=CHATML, **QUICK)
    assert trained.summary["data_report"]["rows"] == 9
    assert AutoTokenizer.from_pretrained(tmp_path / "heads").chat_template == CHATML


def test_refused_rows_are_told(place, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.get_logger("hf_drafthead"), "propagate", True)
    texts = (place / "texts.jsonl").read_text().splitlines()
    (tmp_path / "texts.jsonl").write_text("\n".join([*texts, json.dumps({"text": None})]))
    train_heads(str(place / "base"), "medusa", str(tmp_path / "texts.jsonl"), tmp_path / "heads", **QUICK)
    assert "refused" in caplog.text and "texts.jsonl row 24" in caplog.text
    bad = [json.dumps({"text": None}), json.dumps({"text": None, "unused": True, "given": 10**30, "ids": [10**12]})]
    (tmp_path / "first.jsonl").write_text("\n".join([*bad, *texts]))
    settings = {**QUICK, "held_out_rows": 1}
    trained = train_heads(str(place / "base"), "medusa", str(tmp_path / "first.jsonl"), tmp_path / "first", **settings)
    report = trained.summary["data_report"]
    named = [name.partition(":")[0] for name in report["refusals"]]
    assert report["refused"] == 2 and named == ["first.jsonl row 0", "first.jsonl row 1"]


def test_short_rows_are_no_harm(place, tmp_path):
    texts = (place / "texts.jsonl").read_text().splitlines()
    short = [json.dumps({"text": "y"})] * 2
    (tmp_path / "texts.jsonl").write_text("\n".join([*short[:1], *texts[:4], *short, *texts[4:]]))
    settings = {**QUICK, "per_device_train_batch_size": 1, "max_steps": 26}
    trained = train_heads(str(place / "base"), "medusa", str(tmp_path / "texts.jsonl"), tmp_path / "heads", **settings)
    assert trained.summary["steps"] == 26 and trained.summary["held_out"]["loss"] > 0


def test_figures_are_of_the_heads_that_are_saved(place, tmp_path):
    """Here the greater loss is taken for the better, so that the first evaluation is the best."""
    how = {"warmup_steps": 0, "lr_scheduler_type": "constant", "save_total_limit": None}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trained = train(place, tmp_path / "heads", max_steps=8, save_steps=4, eval_steps=4, **how, **best)
    state = json.loads((tmp_path / "heads" / "checkpoint-8" / "trainer_state.json").read_text())
    losses = {log["step"]: log["eval_loss"] for log in state["log_history"] if "eval_loss" in log}
    assert losses[4] > losses[8]
    stored = json.loads((tmp_path / "heads" / SUMMARY).read_text())
    for summary in (trained.summary, stored):
        assert summary["held_out"]["loss"] == losses[4] and summary["best_step"] == 4 and summary["steps"] == 8
    saved, chosen = (load_file(tmp_path / "heads" / part / "model.safetensors") for part in ("", "checkpoint-4"))
    assert all(torch.equal(saved[name], chosen[name]) for name in saved)


def test_a_pad_token_that_the_base_does_not_embed_is_not_used(place, tmp_path):
    shutil.copytree(place / "base", tmp_path / "base")
    shutil.copy(place / "texts.jsonl", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(tmp_path / "base")
    lines = [json.dumps({"text": "short"}), (place / "texts.jsonl").read_text(), json.dumps({"text": "a [PAD] b"})]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    trained = train(tmp_path, tmp_path / "heads")
    report = trained.summary["data_report"]
    assert report["refused"] == 1 and "the token '[PAD]', number" in report["refusals"][0]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    rows = [{"text": "short"}, {"text": "def function(a, b):\n    return a"}, {"text": "a [PAD] b"}]
    written = distill(base, tokenizer, Dataset.from_list(rows), tmp_path / "own.jsonl", max_new_tokens=4, batch_size=2)
    assert written.answers == 2 and written.refused == 1
