"""What was saved, loaded again, writes the text of what was saved; nothing goes before its replacement is whole."""

import random
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments

from hf_drafthead.modeling import MedusaForCausalLM
from hf_drafthead.modeling.adapters import adapters_of
from tests.bases import tiny_base

IDS = torch.tensor([[5, 9, 33, 21]])
ROWS = Dataset.from_list([{"input_ids": [5, 9, 33, 21, 7, 3], "labels": [5, 9, 33, 21, 7, 3]}] * 8)
LORA = {"r": 2, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
SEQUENCES, LENGTH = 300, 6
AT_ONCE = 10  # sequences of one test

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks


class BaseTrainer(Trainer):
    """Trains the base of a model with heads, as those of TRL do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model.base(**inputs).loss


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def train(model, folder: Path, steps: int = 1, **resume) -> None:
    """Some steps of the base's loss by a Trainer, which saves each of them."""
    model.requires_grad_(False)
    model.base.requires_grad_(True)
    quick = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_steps": 1, "logging_strategy": "no"}
    settings = TrainingArguments(str(folder), max_steps=steps, learning_rate=0.05, **quick)
    BaseTrainer(model, settings, train_dataset=ROWS).train(**resume)
    model.eval().requires_grad_(False)


class Person:
    """Somebody who has a model and does one thing with it after another."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.choose, self.count = folder, random.Random(seed), 0
        torch.manual_seed(seed)
        tiny_base("llama-gqa", seed=seed, tie_word_embeddings=seed % 3 == 0).save_pretrained(folder / "named")
        self.model = MedusaForCausalLM.from_base(folder / "named").eval()
        self.saved: Path | None = None

    def place(self) -> Path:
        """A new folder, or the one of the last save."""
        if self.saved is not None and self.choose.random() < 0.5:
            return self.saved
        self.count += 1
        return self.folder / f"saved {self.count}"

    def train_a_step(self) -> None:
        parameter = self.choose.choice([p for p in self.model.base.parameters() if p.dim() > 1])
        with torch.no_grad():
            row = self.choose.randrange(len(parameter))  # one row, as a token that was in the batch has
            parameter[row].add_(torch.randn_like(parameter[row]))

    def put_an_adapter_on(self) -> None:
        if len(adapters_of(self.model.base)) < 2:
            self.model.add_adapter(LoraConfig(**LORA), f"lora{self.count}{self.choose.random()}".replace(".", ""))
            self.model.eval()

    def switch_adapters(self) -> None:
        layers = [module for module in self.model.base.modules() if hasattr(module, "lora_A")]
        names = list(adapters_of(self.model.base))
        wanted = self.choose.sample(names, self.choose.randint(0, len(names))) if names else []
        for layer in layers:
            layer.enable_adapters(bool(wanted))
            if wanted:
                layer.set_adapter(wanted)

    def merge_an_adapter(self) -> None:
        if not adapters_of(self.model.base):
            adapter = self.folder / f"adapter {self.choose.random()}"
            get_peft_model(tiny_base("llama-gqa"), LoraConfig(**LORA)).save_pretrained(adapter)
            self.model = PeftModel.from_pretrained(self.model, adapter).merge_and_unload().eval()

    def round_its_weights(self) -> None:
        for parameter in self.model.base.parameters():
            parameter.data = parameter.data.bfloat16().double()

    def save_by_a_trainer(self) -> None:
        if not adapters_of(self.model.base):
            train(self.model, place := self.folder / f"run {self.choose.random()}")
            self.saved = place / "checkpoint-1"

    def resume(self) -> None:
        if adapters_of(self.model.base):
            return
        before = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        train(self.model, place := self.folder / f"run {self.choose.random()}", 2)
        wanted = logits(self.model)
        self.model.load_state_dict(before)
        train(self.model, place, 2, resume_from_checkpoint=str(place / "checkpoint-1"))
        torch.testing.assert_close(logits(self.model), wanted)

    def save(self) -> None:
        shards = self.choose.choice([{}, {"max_shard_size": "20KB"}])
        include = self.choose.choice([None, None, True])
        self.saved = self.place()
        self.saved.mkdir(exist_ok=True)
        (self.saved / "mine.txt").write_text("mine")
        self.model.save_pretrained(self.saved, include_base=include, **shards)

    def load(self) -> None:
        self.save()
        wanted, names = logits(self.model), adapters_of(self.model.base)
        kind = self.choose.choice([AutoModel, AutoModelForCausalLM, MedusaForCausalLM])
        self.model = kind.from_pretrained(self.saved)
        torch.testing.assert_close(logits(self.model), wanted)
        assert adapters_of(self.model.base) == names and (self.saved / "mine.txt").read_text() == "mine"


ACTIONS = [name for name in vars(Person) if not name.startswith("_") and name != "place"]


def live(folder: Path, seed: int) -> None:
    """A sequence of actions, with a load at its end."""
    person = Person(folder, seed)
    for _ in range(LENGTH):
        getattr(person, person.choose.choice(ACTIONS))()
    person.load()
    if person.saved is not None:  # what was saved needs nothing but the named base
        moved = folder / "moved"
        shutil.copytree(person.saved, moved)
        torch.testing.assert_close(logits(AutoModel.from_pretrained(moved)), logits(person.model))


@pytest.mark.few(1)
@pytest.mark.parametrize("first", range(0, SEQUENCES, AT_ONCE))
def test_what_was_saved_writes_the_text_of_what_was_saved(tmp_path, first):
    for seed in range(first, first + AT_ONCE):
        (tmp_path / str(seed)).mkdir()
        live(tmp_path / str(seed), seed)


FAULTS = {
    "changes are not seen": ("hf_drafthead.modeling.base.change_of_base", lambda *_: None),
    "the base of a checkpoint is not restored": ("hf_drafthead.modeling.base.restore_base", lambda *_: None),
    "adapters are not saved": ("hf_drafthead.modeling.adapters.save_adapters", lambda *_: None),
    "all adapters are active": ("hf_drafthead.modeling.loading.activate", lambda *_: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_law_can_fail(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(*FAULTS[fault])
    for seed in range(60):
        (tmp_path / str(seed)).mkdir()
        try:
            live(tmp_path / str(seed), seed)
        except (AssertionError, OSError):
            return
    raise AssertionError("no sequence shows the fault")
