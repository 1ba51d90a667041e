"""The command on several ranks, started as torchrun starts it and a good deal sooner.

What torchrun gives its processes is an environment and a store of its own; both are given here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
from pathlib import Path

import pytest
import tiny
import torch.distributed as dist
from distributed.processes import outcomes_of

from midstep.cli import launch
from midstep.cli import run as run_command

# No dropout, which draws other numbers on every rank.
PLAIN = ("torch.nn.Dropout(0.3)", "torch.nn.ReLU()")


@dataclasses.dataclass(frozen=True)
class Said:
    """What one rank said, and how it ended."""

    code: int
    out: str
    err: str


class Ended(Exception):
    """Ends the process, as the exit code would: others may wait for that."""

    def __init__(self, code: int, out: str) -> None:
        super().__init__(code)
        self.code = code
        self.out = out


def train(*arguments: object, size: int, seconds: float = 60.0) -> list[Said]:
    """Run `midstep train` with these arguments on so many ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = outcomes_of(
        _rank, store.port, list(map(str, arguments)), size=size, seconds=seconds, has_group=False
    )
    said = []
    for outcome in outcomes:
        assert outcome.error in {None, "Ended"}, outcome
        code, out = outcome.value or (outcome.details.get("code"), outcome.details.get("out"))
        said.append(Said(code, out, outcome.stderr))
    return said


def _rank(rank: int, size: int, port: int, arguments: list[str]) -> tuple[int, str]:
    os.environ |= {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank}",
        "WORLD_SIZE": f"{size}",
        "LOCAL_WORLD_SIZE": f"{size}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    launch._LINGER_SECONDS = launch._ARRIVE_SECONDS = 0.2  # nobody ends the others here
    sys.argv[0] = "midstep/__main__.py"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = run_command(["train", *arguments])
    if code:
        raise Ended(code, out.getvalue())
    return code, out.getvalue()


def trained(*arguments: object, size: int) -> list[Said]:
    """Run it to its end."""
    said = train(*arguments, size=size)
    assert [each.code for each in said] == [0] * size, said
    return said


def assert_same_run(one: Path, other: Path, *, rel: float = 1e-6) -> None:
    """Hold the records of two runs against each other: facts to be equal, numbers to be near."""
    for name in ("updates.jsonl", "held_out.jsonl"):
        ours, theirs = tiny.lines(one, name), tiny.lines(other, name)
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert a.keys() == b.keys()
            for key in a:
                # A step of Adam divides by moments: what rounds in them counts for more.
                near = 1e-3 if key.startswith("update_") else rel
                wanted = a[key] if isinstance(a[key], str) else pytest.approx(a[key], rel=near)
                assert b[key] == wanted, (key, a, b)
