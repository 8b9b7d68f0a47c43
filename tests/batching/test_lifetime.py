"""What becomes of a manager when its model, its process, or whoever holds it changes or goes away."""

import copy
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from transformers import GenerationConfig

from hf_drafthead.batching import manager as managers
from hf_drafthead.generation.batch import Batch
from hf_drafthead.modeling import DraftModelForCausalLM
from tests.bases import tiny_base
from tests.batching.requests import TREE, add, alone, final
from tests.batching.test_manager import LONG, SHORT, held, standing  # noqa: F401

TRAINED = (
    "RuntimeError: the model is in training mode, which changes what it computes (attention_dropout=0.3 of "
    "LlamaAttention): train it within pause(), then call eval()."
)


@pytest.fixture
def dropping():
    """Heads of a base that drops out while it is trained."""
    base = tiny_base("llama-gqa", dtype=torch.float32, attention_dropout=0.3)
    return DraftModelForCausalLM.from_base(base, draft=copy.deepcopy(base)).eval()


def settings(**named) -> GenerationConfig:
    """A config of generation without an end, as transformers' manager takes it."""
    config = GenerationConfig(**named)
    config.eos_token_id = -1
    return config


def test_a_model_that_is_trained_while_it_serves(dropping, managed):
    """Whoever runs, and whoever comes, is told; nobody gets another text. Back in eval mode it serves on."""
    manager, expected = managed(dropping), alone(dropping.base, ([3, 4, 5], LONG))
    name, go_on = standing(manager)
    dropping.train()
    later = add(manager, ([5, 6], SHORT))
    go_on()
    result, other = final(manager, name), final(manager, later)
    assert result.error == other.error == TRAINED and other.generated_tokens == []
    assert result.generated_tokens == expected[: len(result.generated_tokens)]
    dropping.eval()
    assert final(manager, add(manager, ([5, 6], SHORT))).generated_tokens == alone(dropping.base, ([5, 6], SHORT))


def test_a_model_without_dropout_serves_on_in_training_mode(managed):
    model = DraftModelForCausalLM.from_base(base := tiny_base("llama-gqa"), draft=copy.deepcopy(base)).eval()
    manager, expected = managed(model), alone(base, ([3, 4, 5], LONG))
    model.train()
    result = final(manager, add(manager, ([3, 4, 5], LONG)))
    assert result.generated_tokens == expected and result.error is None and result.accepted > 0


def test_a_model_that_is_put_into_training_mode_within_a_step(dropping, managed, monkeypatch):
    manager, step = managed(dropping, start=False), Batch.step
    expected, steps = alone(dropping.base, ([3, 4, 5], LONG)), []

    def trained(self):
        steps.append(1)
        if len(steps) == 5:
            dropping.train()
        return step(self)

    monkeypatch.setattr(Batch, "step", trained)
    name = add(manager, ([3, 4, 5], LONG))
    manager.start()
    result = final(manager, name)
    dropping.eval()
    assert result.error == TRAINED and result.generated_tokens == expected[: len(result.generated_tokens)]


LEAVES = """
import transformers
from transformers import AutoModelForCausalLM
from hf_drafthead import zoo
model = AutoModelForCausalLM.from_pretrained(zoo.path("medusa"))
manager = model.init_continuous_batching(slots=2, draft_tree=[[0]])
manager.start()
names = [manager.add_request([5, 6], max_new_tokens=400, eos_token_id=-1, streaming=True) for _ in range(20)]
manager.get_result(names[0])
print("left")
"""


@pytest.mark.slow
def test_a_process_that_ends_with_requests_ends_well():
    """A thread in the middle of torch aborts a process that ends."""
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "left\n"), done.stderr
    assert "terminate called" not in done.stderr


def test_a_process_does_not_wait_long_for_a_thread_that_is_held(held, monkeypatch):  # noqa: F811
    monkeypatch.setattr(managers, "LAST_STEP", 0.2)
    manager, name, go_on = held
    manager._end_with_process()
    assert manager.is_running()
    go_on()
    assert final(manager, name).error == "RuntimeError: the manager was stopped before this request was finished"


def test_a_process_that_ends_within_a_pause_ends_the_thread(guessing, managed):
    manager = managed(guessing)
    with manager.pause():
        manager._end_with_process()
        assert not manager.is_running()


def test_several_sequences_of_a_prompt_with_a_seed_differ(guessing):
    wanted = {"max_new_tokens": 12, "do_sample": True, "eos_token_id": None}
    results = guessing.generate_batch([[3, 4]], settings(**wanted), num_return_sequences=3, seed=5, slots=2)
    texts = [alone(guessing.base, ([3, 4], {**wanted, "seed": seed})) for seed in (6, 7, 5)]
    assert [result.generated_tokens for result in results.values()] == texts and texts[0] != texts[1]


def test_an_error_among_the_prompts_of_a_batch_does_not_wait_for_the_others(guessing):
    begun = threading.active_count()
    with pytest.raises(ValueError, match="the prompt is"):
        guessing.generate_batch([[3]] * 2000 + [[]], max_new_tokens=200, eos_token_id=-1, slots=2, draft_tree=TREE)
    assert threading.active_count() <= begun + 1  # but for that of the progress bar


def test_an_interrupt_while_a_pause_begins_leaves_no_pause(held):  # noqa: F811
    manager, name, go_on = held
    waits = threading.Thread(target=interrupt_when, args=(lambda: manager._pauses,))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    try:
        waits.start()
        with pytest.raises(KeyboardInterrupt), manager.pause():
            time.sleep(60)
    finally:
        signal.signal(signal.SIGINT, before)
    waits.join()
    go_on()
    assert final(manager, name).error is None


def interrupt_when(condition) -> None:
    """Interrupt the main thread as soon as something holds."""
    while not condition():
        time.sleep(0.001)
    time.sleep(0.05)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
