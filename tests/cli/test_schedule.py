"""`midstep schedule`: the rates in words, as JSON and as a picture."""

import json
import math
from pathlib import Path

import pytest
import tiny

COSINE = ["schedule", "warmup_cosine", "--peak", "3e-4", "--warmup", "100", "--total", "1000"]


def test_first_and_last_rate_area_and_the_conventions_of_others_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tiny.run(*COSINE) == 0
    out = capsys.readouterr().out
    assert "one rate an update" in out
    assert "first 3.000e-06, last 0.000e+00, peak in update 100" in out
    assert "500.0 updates at the peak" in out
    assert "never" in next(line for line in out.splitlines() if line.startswith("timm "))


def test_json_holds_the_rate_of_every_update(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.run(*COSINE, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    rates = values["lr"]
    assert len(rates) == 1000
    for step in (99, 100, 550, 999):
        done = (step + 1 - 100) / 900
        assert rates[step] == pytest.approx(3e-4 * (1 + math.cos(math.pi * done)) / 2, abs=1e-18)
    assert values["conventions"]["midstep"]["peak_update"] == 100


def test_moving_a_schedule_at_the_wrong_end_of_an_epoch_loses_its_first_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["schedule", "linear", "--warmup", "4", "--total", "10", "--per-epoch"]
    assert tiny.run(*arguments) == 0
    out = capsys.readouterr().out
    assert "one rate an epoch" in out
    assert "end of each epoch    25%, 50%, 75%, 100%, 83%" in out
    assert "start of each epoch  50%, 75%, 100%, 83%, 67%" in out


def test_the_picture_names_every_convention(tmp_path: Path) -> None:
    assert tiny.run(*COSINE, "--picture", str(tmp_path / "rates.svg")) == 0
    text = (tmp_path / "rates.svg").read_text()
    for name in ("midstep", "optax", "nanoGPT", "learning rate"):
        assert name in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cosinus"], "no schedule"),
        (["cosine", "--total", "0"], "total"),
        (["cosine", "--total", "10", "--warmup", "10"], "warmup"),
        (["cosine", "--peak", "0"], "greater than 0"),
        (["cosine", "--minimum", "2"], "minimum"),
        (["cosine", "--stable", "3"], "only `wsd`"),
        (["polynomial", "--power", "0"], "power"),
        (["cosine", "--picture", "rates.gif"], ".png, .svg, .html"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert tiny.run("schedule", *arguments) == 2
    assert words in tiny.one_line(capsys)


@pytest.mark.parametrize("name", ["wsd", "warmup-stable-decay", "inverse_sqrt", "constant"])
def test_every_name_is_understood(name: str) -> None:
    assert tiny.run("schedule", name, "--warmup", "5") == 0
