"""The loop of overhead.py as other libraries run it; each where it is installed.

    pip install -c constraints.txt -e '.[peers]'

The same model, rows and windows, with as little logging as each lets one ask for.
"""

import contextlib
import importlib.util
import io
import logging
import tempfile
from collections.abc import Callable
from importlib.metadata import version

import torch
import torch.nn.functional as F
from overhead import WINDOW, Data, made
from torch import Tensor, nn


def accelerate_loop(data: Data) -> None:
    """`with accelerator.accumulate(model)`, as its guide writes it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    model, optimizer = accelerator.prepare(*made())
    for x, y in data:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def fabric_loop(data: Data) -> None:
    """`fabric.backward` inside `no_backward_sync`, as its guide writes it."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(*made())
    for index, (x, y) in enumerate(data, start=1):
        is_accumulating = index % WINDOW != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            fabric.backward(F.mse_loss(model(x), y) / WINDOW)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()


def ignite_loop(data: Data) -> None:
    """`create_supervised_trainer`, which has no clipping of its own."""
    from ignite.engine import create_supervised_trainer

    model, optimizer = made()
    trainer = create_supervised_trainer(
        model, optimizer, F.mse_loss, gradient_accumulation_steps=WINDOW
    )
    trainer.run(data, max_epochs=1)


class _Scored(nn.Module):
    """What the trainer asks of a model: batch in, loss out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.inner(x), labels)}


def transformers_loop(data: Data) -> None:
    """`Trainer.train`, without logs, checkpoints and bars."""
    from transformers import Trainer, TrainingArguments

    inner, _ = made()
    model = _Scored(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = [{"x": x[i], "labels": y[i]} for x, y in data for i in range(len(x))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=WINDOW,
            num_train_epochs=1,
            max_grad_norm=1.0,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()


_ALL: dict[str, tuple[str, str, Callable[[Data], None]]] = {
    "Accelerate": ("accelerate", "accelerate", accelerate_loop),
    "Lightning Fabric": ("lightning", "lightning", fabric_loop),
    "ignite": ("ignite", "pytorch-ignite", ignite_loop),
    "Transformers trainer": ("transformers", "transformers", transformers_loop),
}


def installed() -> dict[str, Callable[[Data], None]]:
    """The loops of the peers that are here, by name and version."""
    for name in ("lightning", "lightning.fabric", "accelerate", "transformers", "ignite"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return {
        f"{name} {version(package)}": loop
        for name, (module, package, loop) in _ALL.items()
        if importlib.util.find_spec(module) is not None
    }
