"""A recipe that trains in milliseconds, and what tests of the command do with it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from midstep.cli import run as run_command

RECIPE = """
import torch
import midstep as ms

def recipe(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3))
    x, y = torch.randn(48, 4), torch.randint(0, 3, (48,))
    y[::7] = -100
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed)
    )
    return ms.Recipe(
        model=model,
        train=loader,
        held_out=[(x[:8], y[:8])],
        loss=lambda model, batch: ms.cross_entropy(model(batch[0]), batch[1]),
        count=ms.targets(),
        optimizer=lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr),
        lr=0.01,
        size=2,
        steps=20,
        clip=ms.ByGlobalNorm(0.5),
        schedule=lambda steps: ms.schedules.cosine(total=steps, warmup=2),
        baselines={"guessing": 1.0986},
    )
"""

LOSS = "ms.cross_entropy(model(batch[0]), batch[1])"
BEFORE_LOSS = "loss=lambda model, batch: "


def write(path: Path, *changes: tuple[str, str]) -> Path:
    """Write the recipe, with words replaced; each must be there."""
    text = RECIPE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def at_microbatch(number: int, action: str) -> tuple[str, str]:
    """A change of the recipe: do something (an expression) just before one of its forwards.

    Held-out batches count, too.
    """
    counter = f"({action}) if next(recipe.calls) == {number} else None"
    return BEFORE_LOSS, f"{BEFORE_LOSS}({counter}) or "


COUNTING = (
    "def recipe(seed):",
    "import itertools, os, signal\n\ndef recipe(seed):\n    recipe.calls = itertools.count(1)",
)
OF_THE_MACHINE = ("seconds", "stage_seconds", "memory_bytes")
SLOW = (BEFORE_LOSS, f"{BEFORE_LOSS}__import__('time').sleep(0.02) or ")


def run(*arguments: object) -> int:
    """Run the command in this process, and give its exit code."""
    return run_command([str(argument) for argument in arguments])


def loaded_by(*arguments: str) -> set[str]:
    """The modules that a process has loaded when the command has done what was asked."""
    code = (
        f"import sys\nfrom midstep.cli import run\ncode = run({list(arguments)!r})\n"
        "print('\\n', *sys.modules, file=sys.stderr)\nsys.exit(code)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    return set(process.stderr.split())


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What the command said on stderr, which must be one line."""
    err = capsys.readouterr().err.strip()
    assert err.startswith("midstep: ")
    assert "\n" not in err
    return err


def lines(folder: Path, name: str = "updates.jsonl") -> list[dict[str, object]]:
    """The records of a run, without what the machine makes differ between two equal runs."""
    text = (folder / name).read_text()
    return [
        {key: value for key, value in json.loads(line).items() if key not in OF_THE_MACHINE}
        for line in text.splitlines()
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in the checkpoint of a run."""
    model: dict[str, torch.Tensor] = torch.load(folder / "checkpoint.pt", weights_only=True)[
        "model"
    ]
    return model


def same_end(one: Path, other: Path) -> bool:
    """Whether two runs came to the same weights by the same records, to the last bit."""
    before, after = weights(one), weights(other)
    return (
        lines(one) == lines(other)
        and lines(one, "held_out.jsonl") == lines(other, "held_out.jsonl")
        and all(torch.equal(before[name], after[name]) for name in before.keys() | after.keys())
    )


def start(recipe: Path, *options: object) -> "subprocess.Popen[str]":
    """Train in another process, slowly enough to be met in the middle of it."""
    return subprocess.Popen(
        [sys.executable, "-m", "midstep", "train", str(recipe), *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for_updates(folder: Path, count: int) -> None:
    """Return when so many updates are recorded."""
    path = folder / "updates.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.01)
    raise AssertionError("no updates came")
