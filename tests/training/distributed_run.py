"""A small training of draft heads, run once or in several processes; process 0 writes down what came of it.

Run as a script: KIND FOLDER.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_drafthead.training.heads_loss import HeadsLoss
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES
from tests.training.test_trainer import trainer_of

HYDRA_PLUS_PLUS = next(family for family in FAMILIES if family.name == "hydra++")
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
ROWS = torch.randint(3, VOCABULARY, (32, 24), generator=torch.Generator().manual_seed(0))


class Uneven(torch.utils.data.Dataset):
    """Rows with very different numbers of labels, which a mean of means would get wrong."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        labels = ROWS[index].clone()
        labels[: (index * 5) % 20] = -100
        return {"input_ids": ROWS[index], "labels": labels}


def replicated(folder):
    """Four steps of two accumulated batches, with the Trainer."""
    model = HYDRA_PLUS_PLUS.build(tiny_base(dtype=torch.float32))
    settings = {"max_steps": 4, "logging_steps": 1, "teacher_weight": 0.5, "learning_rate": 1e-3}
    batches = {"per_device_train_batch_size": 4 // PROCESSES, "gradient_accumulation_steps": 2}
    trainer = trainer_of(model, folder, **settings, **batches)
    trainer.train_dataset = Uneven()
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    found = {name: [float(entry[name]) for entry in history] for name in ("loss", "grad_norm")}
    found["head0_top5"] = trainer.evaluate(Uneven())["eval_head0_top5"]
    if trainer.is_world_process_zero():
        write(folder, found | {"processes": trainer.accelerator.num_processes}, dict(model.drafter.named_parameters()))


def sharded(folder):
    """Gradients of one batch, with the weights spread over the processes as FSDP spreads them."""
    model = HYDRA_PLUS_PLUS.build(tiny_base(dtype=torch.float32))
    model.base.requires_grad_(False)
    if PROCESSES > 1:
        dist.init_process_group("gloo")
        for layer in model.base.model.layers:
            fully_shard(layer)
        fully_shard(model)
    loss, _ = model(training_loss=HeadsLoss(1.0, 0.5), inputs={"input_ids": ROWS, "labels": ROWS})
    loss.backward()
    gradients = {
        name: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        for name, parameter in model.drafter.named_parameters()
    }
    if int(os.environ.get("RANK", "0")) == 0:
        write(folder, {"loss": loss.item(), "processes": PROCESSES}, gradients)
    if PROCESSES > 1:
        dist.barrier()  # nobody leaves while the other is still at work
        dist.destroy_process_group()


def write(folder, found, tensors):
    (folder / "found.json").write_text(json.dumps(found))
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "found.safetensors")


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
