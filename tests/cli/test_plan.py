"""`midstep plan`: arithmetic without torch, traced ways, one line where it cannot be done."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

RECIPE = """
import torch
import midstep as ms


def recipe(seed):
    blocks = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Tanh()) for _ in range(4)]
    x = torch.randn(64, 128)
    return ms.Recipe(
        model=torch.nn.Sequential(torch.nn.Sequential(*blocks), torch.nn.Linear(128, 2)),
        train=[(x[i : i + 16], torch.zeros(16, dtype=torch.long)) for i in range(0, 64, 16)],
        loss=lambda model, batch: ms.cross_entropy(model(batch[0]), batch[1]),
        count=ms.targets(),
        optimizer=lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr),
        size=4,
    )
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(RECIPE)
    return str(path)


def test_400_million_parameters_are_6_4_gb(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.run("plan", "--params", "400M", "--optimizer", "adam") == 0
    out = capsys.readouterr().out
    assert "before activations        6.40 GB (5.96 GiB)" in out
    assert "headroom" in out


def test_the_arithmetic_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom midstep.cli import run\nrun(['plan', '--params', '7B'])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_what_does_not_fit_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.run("plan", "--params", "7B", "--budget", "24GB") == 1
    assert "left for activations" in capsys.readouterr().out
    adapters = ("--lora", "16", "--adapt", "128x4096x4096", "--dtype", "bf16")
    assert tiny.run("plan", "--params", "7B", "--budget", "24GB", *adapters) == 0


def test_shards_and_a_master_copy_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--dtype", "bf16", "--master", "--ranks", "8", "--sharded", "zero3")
    assert tiny.run("plan", "--params", "8B", *options, "--format", "json") == 0
    lines = {line["name"]: line["bytes"] for line in json.loads(capsys.readouterr().out)["lines"]}
    assert lines["parameters"] == 2 * 10**9
    assert lines["master weights"] == 4 * 10**9
    assert lines["before activations"] == (2 + 2 + 4 + 8) * 10**9


def test_the_first_way_is_run_and_measured(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.run("plan", recipe, "--rows", "256", "--budget", "3MB", "--check") == 0
    out = capsys.readouterr().out
    assert "ways to an update of 256 rows" in out
    assert "Take microbatches of " in out
    assert "The first, run: predicted" in out
    assert tiny.run("plan", recipe, "--check", "--format", "json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["rows"] == 64  # four batches of 16, as the recipe says
    assert abs(values["checked"]["error"]) < 0.05


def test_a_budget_that_holds_nothing_is_found(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.run("plan", recipe, "--targets", "512", "--budget", "10kB") == 1
    out = capsys.readouterr().out
    assert "0 of" in out
    assert "Nothing fits: the least is " in out


def test_recompute_is_measured_for_every_k_and_drawn(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "k.svg"
    assert tiny.run("plan", recipe, "--recompute", "--picture", picture, "--format", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["every"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["model_parts"] for row in rows[1:]] == [5.0, 4.0, 4 / 3 + 3, 5.0]
    assert {row["gradient_gap"] for row in rows} == {0.0}
    drawn = picture.read_text(encoding="utf-8")
    assert drawn.count('aria-roledescription="point"') == 4
    assert drawn.count('aria-roledescription="bar"') == 5
    assert tiny.run("plan", recipe, "--recompute") == 0
    assert "every 4" in capsys.readouterr().out


CHANGE = ("--batch", "256", "--lr", "0.1", "--decay", "1e-4", "--updates", "1000")


def test_another_batch_gets_advice_with_its_conditions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tiny.run("plan", "--new-batch", "1024", *CHANGE) == 0
    out = capsys.readouterr().out
    assert "250 updates for the same targets" in out
    assert "linear scaling: rate 0.4, decay 0.0001 keeps the exponent 0.01" in out
    assert "square-root scaling: rate 0.2, decay 0.0002" in out
    assert "SGD with momentum and a warm-up" in out
    assert "missing (None) is skipped" in out
    assert tiny.run("plan", "--new-batch", "1024", *CHANGE, "--format", "json") == 0
    linear, _ = json.loads(capsys.readouterr().out)
    assert linear["decay_exponent_unchanged"] == pytest.approx(0.0025)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "what is planned?"),
        (("language", "--params", "1M"), "what is planned?"),
        (("--params", "many"), "`many` is not a count"),
        (("--params", "1M", "--budget", "24"), "bytes with their unit"),
        (("--params", "1M", "--trainable", "2M"), "is more than"),
        (("--params", "1M", "--rows", "2"), "needs a model"),
        (("--params", "1M", "--lora", "8"), "belong together"),
        (("--params", "1M", "--lora", "8", "--adapt", "3x4"), "write number, rows"),
        (("--params", "1M", "--headroom", "1"), "is a share"),
        (("language", "--master"), "with a recipe"),
        (("language", "--picture", "x.svg"), "give both"),
        (("language", "--recompute", "--picture", "x.gif"), ".png, .svg, .html"),
        (("language", "--check", "--ranks", "2"), "Check a plan of one rank"),
        (("--new-batch", "8"), "belong together"),
        (("language", "--new-batch", "8"), "one at a time"),
        (("no_such",), "neither built in"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_one_clear_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.run("plan", *arguments) == 2
    assert message in tiny.one_line(capsys)
