"""What the environment says of other processes, and what is made of it."""

from __future__ import annotations

import pytest

from midstep.cli.launch import Launch, Speaker
from midstep.cli.options import ParallelName
from midstep.errors import RankFailure

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run7",
}


def test_the_environment_of_torchrun_is_understood() -> None:
    launch = Launch.of(TORCHRUN)
    assert (launch.rank, launch.num_ranks, launch.local_rank, launch.num_local) == (5, 8, 1, 4)
    assert launch.is_together
    assert launch.is_by_torchrun


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_part_of_it_names_nobody(missing: str) -> None:
    rest = {name: value for name, value in TORCHRUN.items() if name != missing}
    assert Launch.of(rest) == Launch.of({**TORCHRUN, "RANK": "first"}) == Launch()


def test_an_operator_that_starts_one_process_a_machine_is_understood() -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    launch = Launch.of({name: TORCHRUN[name] for name in names})
    assert (launch.rank, launch.num_ranks, launch.local_rank) == (5, 8, 0)
    assert not launch.is_by_torchrun


def test_how_ranks_share_a_model_is_what_was_typed_or_what_the_run_began_with() -> None:
    ddp, fsdp = ParallelName.DDP, ParallelName.FSDP
    many = Launch.of(TORCHRUN)
    assert many.parallel(ddp) is many.parallel(ddp, fsdp) is many.parallel(None, ddp) is ddp
    assert Launch().parallel(None, ddp) is None  # a run of many goes on in one process
    with pytest.raises(ValueError, match="nothing says how they share"):
        many.parallel(None)
    with pytest.raises(ValueError, match="there is nobody to share"):
        Launch().parallel(ddp)


def test_the_command_to_go_on_is_spelt_as_this_one_was_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ("train", "--resume", "a run")
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/midstep"])
    assert Launch().command(*arguments) == "midstep train --resume 'a run'"
    monkeypatch.setattr("sys.argv", ["/somewhere/midstep/__main__.py"])
    assert Launch().command(*arguments) == "python -m midstep train --resume 'a run'"
    assert Launch.of(TORCHRUN).command(*arguments) == (
        "torchrun --nnodes=2 --nproc-per-node 4 -m midstep train --resume 'a run'"
    )


@pytest.mark.parametrize(("rank", "speaks"), [(0, True), (1, True), (2, False)])
def test_the_next_rank_speaks_when_the_first_is_gone(
    rank: int, speaks: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with Speaker(Launch(rank=rank, num_ranks=3)) as speaker:
        speaker._has_met = True
        speaker("it ended.", RankFailure("Rank 0 is gone.", rank=0, is_lost=True))
        speaker("odd.", UserWarning("odd"))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["midstep: it ended."] * speaks + ["midstep: odd."] * (rank == 0)
