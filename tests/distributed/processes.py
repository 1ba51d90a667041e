"""Real processes that talk over gloo, for tests of what only several ranks can show.

    results = run(case, size=4)

starts `size` processes, has each call `case(rank, size, *args)` inside one process group, and gives
what each returned. They are forked from a server that has torch imported already, so that a test
costs a tenth of a second and shares nothing with the next. Whatever happens they are gone when
`run` returns.

A case is a function at the top level of a test module. It returns plain values or tensors; what
they must be is asserted in the test, where pytest can show it.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import faulthandler
import gc
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Far beyond what a test may take: whoever waits for a collective to time out fails the test.
COLLECTIVE_SECONDS = 90.0
LIMIT_SECONDS = 60.0
# What torch says of its own parts when they are put together as its documentation does.
TORCH_WARNINGS = ("FSDP2-wrapped module .* returned a view tensor",)

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "pytest",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.distributed.tensor.debug",
        "torch.nn.parallel",
        "midstep.updater",
        "midstep.ranks.opening",
        "midstep.ranks.sharing",
        "midstep.checkpoint.folder",
        "midstep.cli.watching",
        "midstep.recipes.training",
        "distributed.processes",
        "distributed.models",
    ]
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a case ended on one rank.

    Attributes:
        value: What it returned.
        error: The name of the class of what it raised; None if it returned.
        message: Of the error.
        details: The error's own attributes.
        trace: Where it was raised.
        seconds: From the start of the case to its end.
        exit_code: Of the process; negative when a signal ended it.
        stderr: What the process wrote there.
    """

    value: Any = None
    error: str | None = None
    message: str = ""
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    trace: str = ""
    seconds: float = 0.0
    exit_code: int | None = None
    stderr: str = ""


def run(case: Callable[..., Any], *args: Any, size: int, seconds: float = LIMIT_SECONDS) -> Any:
    """Give what a case returned on each rank.

    Raises:
        AssertionError: It raised, died or did not end in time on some rank.
    """
    outcomes = outcomes_of(case, *args, size=size, seconds=seconds)
    report = [
        f"rank {rank}, exit code {o.exit_code}: {o.error or 'no answer'}: {o.message[:300]}"
        for rank, o in enumerate(outcomes)
        if o.error is not None or o.exit_code != 0
    ]
    # The first to fail tells why; the others mostly that it did.
    failed = [o for o in outcomes if o.error is not None or o.exit_code != 0]
    if failed:
        first = min(failed, key=lambda o: (o.error in (None, "RankFailure"), o.seconds))
        report += [first.trace[-3000:], first.stderr[-3000:]]
    assert not report, "\n".join(report)
    return [outcome.value for outcome in outcomes]


def outcomes_of(
    case: Callable[..., Any],
    *args: Any,
    size: int,
    seconds: float = LIMIT_SECONDS,
    has_group: bool = True,
) -> list[Outcome]:
    """Say how a case ended on each rank; none is left running.

    Without `has_group` the case starts a process group itself, or does without.
    """
    path = inspect.getsourcefile(case)
    call = pickle.dumps((path, case.__name__, args))
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_SERVER.Pipe() for _ in range(size)]
        processes = [
            _SERVER.Process(
                target=_rank,
                args=(rank, size, pipes[rank][1], call, f"{folder}/{rank}", seconds, has_group),
                daemon=True,
            )
            for rank in range(size)
        ]
        try:
            for process in processes:
                process.start()
            ours = [pipe for pipe, _ in pipes]
            for _, theirs in pipes:
                theirs.close()  # or the end of a process would not show
            deadline = time.monotonic() + seconds
            if has_group:
                port = ours[0].recv()
                for pipe in ours[1:]:
                    pipe.send(port)
            found = _answers(ours, deadline)
            _let_go(ours, found)
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()) + 1.0)
            return [
                dataclasses.replace(
                    found.get(rank, Outcome()),
                    exit_code=process.exitcode,
                    stderr=Path(f"{folder}/{rank}").read_text(encoding="utf-8"),
                )
                for rank, process in enumerate(processes)
            ]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(pipes: list[Connection], deadline: float) -> dict[int, Outcome]:
    found: dict[int, Outcome] = {}
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                found[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:  # it died
                continue
    return found


def _let_go(pipes: list[Connection], found: dict[int, Outcome]) -> None:
    for rank, outcome in found.items():
        if outcome.error is None:
            pipes[rank].send(None)


def _rank(  # noqa: PLR0917 - the body of one process
    rank: int, size: int, pipe: Connection, call: bytes, log: str, seconds: float, has_group: bool
) -> None:
    gc.freeze()  # what the server imported is never garbage, and looking would copy its pages
    stderr = os.open(log, os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(stderr, 2)
    faulthandler.dump_traceback_later(max(1.0, seconds - 5.0), file=stderr)
    if has_group:
        dist.init_process_group(
            "gloo",
            store=_store(rank, size, pipe),
            rank=rank,
            world_size=size,
            timeout=dt.timedelta(seconds=COLLECTIVE_SECONDS),
        )
    path, name, args = pickle.loads(call)
    started = time.monotonic()
    torch.manual_seed(0)
    try:
        case = getattr(_module(path), name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for message in TORCH_WARNINGS:
                warnings.filterwarnings("ignore", message)
            value = case(rank, size, *args)
        outcome = Outcome(value, seconds=time.monotonic() - started)
        answer = pickle.dumps(outcome)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test judges it
        outcome = Outcome(
            error=type(error).__name__,
            message=str(error),
            details={k: v for k, v in vars(error).items() if not k.startswith("_")},
            trace=traceback.format_exc(),
            seconds=time.monotonic() - started,
        )
        pipe.send_bytes(pickle.dumps(outcome))
        sys.exit(1)
    pipe.send_bytes(answer)
    pipe.recv()  # the others may still need the store that rank 0 holds


def _store(rank: int, size: int, pipe: Connection) -> dist.Store:
    if rank:
        return dist.TCPStore("127.0.0.1", pipe.recv(), size, is_master=False)
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    return store


def _module(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"case_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
