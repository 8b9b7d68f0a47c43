"""A plain Trainer or a pipeline that publishes: whole, or refused in one line before anything is uploaded."""

import json

import pytest

from tests.hub_upload.test_push import TRAIN, TRAINED

TRAINER = """
from transformers import Trainer, TrainingArguments
rows = [{"input_ids": list(range(5, 21)), "labels": list(range(5, 21))} for _ in range(4)]
def trainer(model, name="heads", push_to_hub=True, **words):
    arguments = TrainingArguments(name, hub_model_id=f"org/{name}", push_to_hub=push_to_hub, max_steps=2, save_steps=1,
        per_device_train_batch_size=2, use_cpu=True, report_to="none", disable_tqdm=True, hub_always_push=True, **words)
    return Trainer(model, arguments, train_dataset=rows)
"""
STRATEGIES = ["end", "every_save", "checkpoint", "all_checkpoints"]


def published(hub, name: str = "org/heads") -> set[str]:
    """All files of all commits but the first, which the Hub makes."""
    return {path for commit in hub.repos[name].commits[1:] for path in commit.files}


def test_heads_on_a_base_of_the_hub_are_whole_in_every_commit(hub, base, clients):
    code = """
for strategy in strategies:
    training = trainer(model, strategy, hub_strategy=strategy)
    training.train()
    training.push_to_hub()
loaded = [AutoModel.from_pretrained(f"org/{name}", trust_remote_code=True) for name in strategies]
print(json.dumps([type(one).__name__ for one in loaded]))
"""
    answer = clients.run(TRAINED + TRAINER + code, token="hf_owner", seed=0, strategies=STRATEGIES)
    assert answer.said == ["MedusaForCausalLM"] * len(STRATEGIES)
    for strategy in STRATEGIES:
        commits = [commit for commit in hub.repos[f"org/{strategy}"].commits if "config.json" in commit.files]
        assert len(commits) >= (1 if strategy == "end" else 2)
        for commit in commits:
            assert {"model.safetensors", "modeling_drafthead.py"} <= set(commit.files)
            assert json.loads(commit.files["config.json"].data)["base_model_name_or_path"] == "org/base"


LOCAL = """
AutoModelForCausalLM.from_pretrained("org/base").save_pretrained("base")
model = MedusaForCausalLM.from_base("base", num_draft_heads=2)
"""


@pytest.mark.few(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_local_base_is_refused_before_the_first_step_is_made(hub, base, clients, strategy):
    code = LOCAL + TRAINER + "trainer(model, hub_strategy=strategy).train()"
    answer = clients.run(code, token="hf_owner", strategy=strategy)
    last = answer.err.strip().splitlines()[-1]
    assert last.startswith("ValueError: the base of these heads is the local path '") and "name it on the Hub (" in last
    assert published(hub) == set()


def test_a_local_base_is_refused_where_a_trained_model_is_pushed_at_the_end(hub, base, clients):
    code = (
        LOCAL
        + TRAINER
        + """
training = trainer(model, push_to_hub=False)
training.train()
training.save_model()
try:
    training.push_to_hub()
except ValueError as error:
    told = str(error)
model.config.base_model_name_or_path = "org/base"
training.push_to_hub()
print(json.dumps(told))
"""
    )
    answer = clients.run(code, token="hf_owner")
    assert answer.said.startswith("the base of these heads is the local path '")
    (commit,) = hub.repos["org/heads"].commits[1:]
    assert json.loads(commit.files["config.json"].data)["base_model_name_or_path"] == "org/base"


def test_a_base_that_is_trained_goes_along_at_the_end_and_is_not_left_out_before(hub, base, clients):
    code = (
        TRAINED
        + TRAIN
        + TRAINER
        + """
text = train(model)
told = []
for strategy in strategies[1:]:
    try:
        trainer(model, hub_strategy=strategy).train()
    except ValueError as error:
        told.append(str(error))
training = trainer(model, hub_strategy="end")
training.push_to_hub()
loaded = AutoModel.from_pretrained("org/heads").generate(ids, max_new_tokens=12).tolist()
print(json.dumps([told, text == loaded]))
"""
    )
    told, same = clients.run(code, token="hf_owner", seed=0, strategies=STRATEGIES).said
    assert same and "base/model.safetensors" in published(hub)
    assert len(told) == 3 and all(line.endswith("set hub_strategy='end'.") for line in told)
    assert len(hub.repos["org/heads"].commits) == 2


def test_a_private_base_is_for_a_private_repository(hub, base, clients):
    base.private = True
    code = (
        TRAINED
        + TRAINER
        + """
try:
    trainer(model).train()
except ValueError as error:
    told = str(error)
trainer(model, "closed", hub_private_repo=True).train()
print(json.dumps(told))
"""
    )
    answer = clients.run(code, token="hf_owner", seed=0)
    assert answer.said.startswith("the base 'org/base' is private, so that others cannot load these heads")
    assert published(hub) == set() and "model.safetensors" in published(hub, "org/closed")


def test_a_pipeline_that_is_published_is_looked_at_too(hub, base, clients):
    code = (
        LOCAL
        + """
write = pipeline("text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained("org/base"))
try:
    write.push_to_hub("org/heads")
except ValueError as error:
    told = str(error)
model.config.base_model_name_or_path = "org/base"
write.push_to_hub("org/heads")
print(json.dumps(told))
"""
    )
    said = clients.run(code, token="hf_owner").said
    assert said.startswith("the base of these heads is the local path '")
    (commit,) = hub.repos["org/heads"].commits[1:]
    assert "modeling_drafthead.py" in commit.files
    assert json.loads(commit.files["config.json"].data)["base_model_name_or_path"] == "org/base"


def test_the_place_where_a_draft_model_came_from_is_not_published(hub, base, clients, tmp_path):
    code = (
        TRAINER
        + """
from hf_drafthead import DraftModelForCausalLM
AutoModelForCausalLM.from_pretrained("org/base").save_pretrained(place)
trainer(DraftModelForCausalLM.from_base("org/base", draft=place)).train()
print(json.dumps(type(AutoModel.from_pretrained("org/heads")).__name__))
"""
    )
    answer = clients.run(code, token="hf_owner", place=str(tmp_path / "draft"))
    assert answer.said == "DraftModelForCausalLM"
    assert str(tmp_path).encode() not in hub.repos["org/heads"].files()["config.json"]


def test_who_publishes_nothing_is_asked_nothing(hub, base, clients):
    code = LOCAL + TRAINER + "asked = trainer(model, push_to_hub=False).train()"
    assert clients.run(code).code == 0
    assert not any("/api/models/org/heads" in one.path for one in hub.asked)
