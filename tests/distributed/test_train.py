"""`midstep train` on several ranks: the run of one process, told and written once."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from distributed.commands import PLAIN, assert_same_run, train, trained
from distributed.processes import run

import midstep as ms
from midstep.checkpoint import load

pytestmark = pytest.mark.distributed

WAYS = {
    "a window that does not divide": ("--size", 3),
    "pieces of a batch": ("--rows", 1),
    "targets": ("--targets", 9),
}


def weights_of(folder: Path) -> list[torch.Tensor]:
    """The weights in a checkpoint of however many ranks, read by one."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    updater = ms.Updater(
        model,
        torch.optim.AdamW(model.parameters()),
        clip=ms.ByGlobalNorm(0.5),
        schedule=ms.schedules.cosine(total=20, warmup=2),
    )
    load(folder / "checkpoint.pt", updater)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("way", "parallel"),
    [*((way, "ddp") for way in WAYS), ("a window that does not divide", "fsdp")],
)
def test_the_run_is_that_of_one_process(way: str, parallel: str, tmp_path: Path) -> None:
    recipe = tiny.write(tmp_path / "tiny.py", PLAIN)
    options = (recipe, *WAYS[way], "--evaluate-every", 7)
    assert tiny.run("train", *options, "--out", tmp_path / "one") == 0
    trained(*options, "--out", tmp_path / "two", "--parallel", parallel, size=2)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    for ours, theirs in zip(
        weights_of(tmp_path / "one"), weights_of(tmp_path / "two"), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_first_rank_speaks_and_writes_and_the_others_do_not(tmp_path: Path) -> None:
    recipe = tiny.write(tmp_path / "tiny.py", PLAIN)
    folder = tmp_path / "run"
    first, *others = trained(recipe, "--size", 3, "--out", folder, "--parallel", "ddp", size=3)
    assert f"{folder}: 20 updates on 3 ranks" in first.out.splitlines()[0]
    assert "20 applied, 0 skipped, from 60 microbatches" in first.out
    assert "the baseline of guessing, 1.0986" in first.out
    assert first.err == ""
    assert [(each.out, each.err) for each in others] == [("", "")] * 2
    names = {"run.json", "updates.jsonl", "held_out.jsonl", "checkpoint.pt"}
    assert {path.name for path in folder.iterdir()} == names
    about = json.loads((folder / "run.json").read_text())
    assert about["num_ranks"] == 3
    assert about["options"] == {"size": 3, "parallel": "ddp"}


NOTED = (
    "data = torch.utils.data.TensorDataset(x, y)",
    """class Noted(torch.utils.data.TensorDataset):
        def __getitem__(self, index):
            with open(f"{__file__}.{os.environ.get('RANK', 0)}", "a") as file:
                file.write(f"{index}\\n")
            return super().__getitem__(index)
    data = Noted(x, y)""",
)
OWN_ORDER = (", generator=torch.Generator().manual_seed(seed)", "")


@pytest.mark.parametrize("has_generator", [True, False])
def test_each_row_is_read_once_a_pass_by_one_rank(has_generator: bool, tmp_path: Path) -> None:
    """Without a generator the order is drawn from global streams, of which each rank has one."""
    changes = (
        NOTED,
        ("import torch\n", "import os, torch\n"),
        *(() if has_generator else (OWN_ORDER,)),
    )
    recipe = tiny.write(tmp_path / "tiny.py", *changes)
    # 48 rows in batches of 4, windows of 3 batches: 4 windows a pass, 2 passes.
    trained(
        recipe, "--size", 3, "--steps", 8, "--out", tmp_path / "run", "--parallel", "ddp", size=2
    )
    read = [Path(f"{recipe}.{rank}").read_text().split() for rank in range(2)]
    assert [len(rows) for rows in read] == [2 * 32, 2 * 16]
    for pass_number in range(2):
        found = Counter(read[0][32 * pass_number :][:32] + read[1][16 * pass_number :][:16])
        assert found == Counter(map(str, range(48)))
    assert read[0][:32] != read[0][32:]


def stopped(recipe: Path, folder: Path, *options: object, size: int, rank: int = 0) -> int:
    """Ask one rank to stop, in its sixth forward, and give the number of updates that were made."""
    text = changed = recipe.read_text()
    asks = "os.kill(os.getpid(), signal.SIGTERM)"
    action = f"os.environ.get('RANK', '0') == '{rank}' and {asks}"
    for old, new in (tiny.at_microbatch(6, action), tiny.COUNTING):
        changed = changed.replace(old, new)
    recipe.write_text(changed)
    arguments = (recipe, "--out", folder, *options)
    if size == 1:
        codes = [tiny.run("train", *arguments)]
    else:
        said = train(*arguments, size=size)
        codes = [each.code for each in said]
        assert "and saved. Go on with: torchrun --nproc-per-node" in said[0].err
        assert all(each.err == "" for each in said[1:])
    assert codes == [143] * size
    recipe.write_text(text)
    return len(tiny.lines(folder))


@pytest.mark.parametrize(
    ("before", "after"),
    [(("ddp", 2), ("", 1)), (("", 1), ("fsdp", 2)), (("fsdp", 2), ("ddp", 3))],
)
def test_a_run_goes_on_with_another_number_of_ranks(
    before: tuple[str, int], after: tuple[str, int], tmp_path: Path
) -> None:
    # One of them draws its order from the global stream.
    changes = [PLAIN, *([OWN_ORDER] if before[1] == 1 else [])]
    recipe = tiny.write(tmp_path / "tiny.py", *changes)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    options = ("--size", 3, "--evaluate-every", 20)
    assert tiny.run("train", recipe, "--out", straight, *options) == 0
    parallel, size = before
    how = ("--parallel", parallel) if parallel else ()
    assert 1 < stopped(recipe, broken, *options, *how, size=size) < 12
    parallel, size = after
    if size == 1:
        assert tiny.run("train", "--resume", broken) == 0
    else:
        said = trained("--resume", broken, "--parallel", parallel, size=size)
        assert re.search(r"note: the run was begun on \d ranks? and goes on with", said[0].err)
    assert_same_run(straight, broken)


def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """With dropout, so that each rank's own random stream must return, too."""
    recipe = tiny.write(tmp_path / "tiny.py")
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    options = ("--parallel", "ddp", "--evaluate-every", 20)
    trained(recipe, "--out", straight, *options, size=2)
    action = "os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGTERM)"
    tiny.write(recipe, tiny.at_microbatch(3, action), tiny.COUNTING)
    said = train(recipe, "--out", broken, *options, size=2)
    assert [each.code for each in said] == [143, 143]
    assert "stopped after 4 of 20 updates" in said[0].err
    tiny.write(recipe)
    trained("--resume", broken, size=2)  # `--parallel` is that of the run
    assert tiny.lines(straight) == tiny.lines(broken)
    assert tiny.lines(straight, "held_out.jsonl") == tiny.lines(broken, "held_out.jsonl")


NAMED = (
    "def recipe(seed):",
    """class Named(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)

def recipe(seed):""",
)


def test_a_loss_may_ask_the_model_for_what_is_its_own(tmp_path: Path) -> None:
    """On several ranks the model is wrapped, of which a recipe need know nothing."""
    recipe = tiny.write(
        tmp_path / "tiny.py",
        ("model = torch.nn.Sequential(", "model = Named(torch.nn.Sequential("),
        ("torch.nn.Linear(8, 3))", "torch.nn.Linear(8, 3)))"),
        (tiny.LOSS, tiny.LOSS.replace("batch[0]", "batch[0].to(model.layers[0].bias.device)")),
        NAMED,
    )
    trained(recipe, "--out", tmp_path / "run", "--steps", 4, "--parallel", "ddp", size=2)


ONE_RANK = "os.environ.get('RANK') == '1'"
FAULTS = {
    "in the data": (
        ("    return ms.Recipe(", f"    if {ONE_RANK}: y[5] = 7\n    return ms.Recipe("),
        "Rank 1 failed: IndexError: Target 7 is out of bounds",
    ),
    "other weights": (
        ("    x, y =", f"    model[0].bias.data += {ONE_RANK}\n    x, y ="),
        "`recipe(seed)` gave rank 1 other weights than rank 0.",
    ),
    "another order": (
        (".manual_seed(seed)\n    )", f".manual_seed(seed + ({ONE_RANK}))\n    )"),
        "`recipe(seed)` gave rank 1 another order of the data than rank 0.",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_goes_wrong_on_one_rank_is_one_line_of_the_first(name: str, tmp_path: Path) -> None:
    change, words = FAULTS[name]
    recipe = tiny.write(tmp_path / "tiny.py", change, ("import torch\n", "import os, torch\n"))
    said = train(recipe, "--out", tmp_path / "run", "--parallel", "ddp", "--size", 3, size=2)
    assert [each.code for each in said] == [2, 2]
    assert words in said[0].err
    assert said[0].err.startswith("midstep: ")
    assert len(said[0].err.splitlines()) == 1
    assert said[1].err == ""


def test_when_the_first_rank_is_killed_the_next_says_so(tmp_path: Path) -> None:
    kills = "os.environ['RANK'] == '0' and os.kill(os.getpid(), signal.SIGKILL)"
    recipe = tiny.write(tmp_path / "tiny.py", tiny.at_microbatch(3, kills), tiny.COUNTING)
    options = ("--parallel", "ddp", "--size", 3, "--save-every", 1)
    _, *others = train(recipe, "--out", tmp_path / "run", *options, size=3)
    assert [each.code for each in others] == [2, 2]
    assert others[0].err.startswith("midstep: Rank 0 is gone without a word")
    assert "The run is saved as it was after 1 updates" in others[0].err, others[0].err
    assert others[1].err == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--parallel", "ddp", "--size", 1), "1 of them would never have any"),
        ((), "2 processes were started and nothing says how they share the model"),
    ],
)
def test_what_several_ranks_cannot_do_is_one_line_of_the_first(
    options: tuple[object, ...], words: str, tmp_path: Path
) -> None:
    recipe = tiny.write(tmp_path / "tiny.py")
    said = train(recipe, "--out", tmp_path / "run", *options, size=2)
    assert [each.code for each in said] == [2, 2]
    assert words in said[0].err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_refused_on_all_ranks(tmp_path: Path) -> None:
    recipe, folder = tiny.write(tmp_path / "tiny.py"), tmp_path / "run"
    assert tiny.run("train", recipe, "--out", folder, "--steps", 4) == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    said = train(recipe, "--out", folder, "--parallel", "fsdp", size=2)
    assert [each.code for each in said] == [2, 2]
    assert "holds a run already" in said[0].err
    assert said[1].err == ""
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_parallel_in_one_process_says_how_to_start_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.chdir(tmp_path):
        assert tiny.run("train", "language", "--parallel", "ddp") == 2
    line = tiny.one_line(capsys)
    assert "torchrun --nproc-per-node 2 -m midstep train" in line
    assert list(tmp_path.iterdir()) == []


PAGE = Path(__file__).parents[2] / "docs" / "many-machines.md"


def script_of_the_page() -> dict[str, Any]:
    code = re.findall(r"```python title=\"train\.py\"\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {"__name__": "train"}
    exec(code, names)
    return names


def run_the_page(rank: int, size: int) -> ms.UpdateRecord:
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{size}"}  # and a process group, as Ray makes
    with contextlib.redirect_stdout(io.StringIO()):
        return script_of_the_page()["main"](steps=6)


def test_the_script_of_the_page_is_the_run_of_one_process_on_two() -> None:
    wanted = script_of_the_page()["main"](steps=6)
    for found in run(run_the_page, size=2):
        assert found.step == 6
        assert found.loss_mean == pytest.approx(wanted.loss_mean, rel=1e-6)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6)
        assert found.denominators == wanted.denominators
