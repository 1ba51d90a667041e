"""Every published figure comes out of the library again, and one that parts is said."""

import json
from typing import Any

import pytest
import tiny
import torch

import midstep.figures
from midstep.figures import accumulation, clocks
from midstep.figures.figure import Figure, all_of, close, entries


@pytest.fixture(scope="module")
def rows() -> list[Figure]:
    return midstep.figures.figures()


def test_there_are_twenty_and_all_agree(rows: list[Figure]) -> None:
    assert [row.id for row in rows] == [f"F{number}" for number in range(1, 21)]
    assert [row.id for row in rows if not row.agrees] == []


def test_only_the_one_that_promised_none_has_no_published_figure(rows: list[Figure]) -> None:
    assert [row.id for row in rows if not row.published] == ["F20"]


def test_computing_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    midstep.figures.figures()
    assert torch.equal(torch.rand(3), expected)


def test_the_command_prints_every_row_as_strict_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rows: list[Figure]
) -> None:
    monkeypatch.setattr(midstep.figures, "figures", lambda: rows)
    assert tiny.run("figures", "--format", "json") == 0

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    printed = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert [row["id"] for row in printed] == [row.id for row in rows]
    assert all({"id", "published", "computed", "agrees"} <= row.keys() for row in printed)
    assert printed[6]["published"]["norm"] == "inf"


def test_the_table_has_every_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rows: list[Figure]
) -> None:
    monkeypatch.setattr(midstep.figures, "figures", lambda: rows)
    assert tiny.run("figures") == 0
    out = capsys.readouterr().out
    assert "20 figures, all agree." in out
    assert "published  norm 206.352; after 1; by_tensor 0.380417" in out


def test_a_figure_that_parts_is_named_and_the_command_found_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A library that counted rows wrongly, in one place only.
    monkeypatch.setattr(accumulation, "elements", lambda: lambda batch: 1.5 * batch[1].numel())
    monkeypatch.setattr(accumulation, "squared_error", lambda m, b: (m(b[0]) - b[1]).square().sum())
    monkeypatch.setattr(
        midstep.figures, "figures", lambda: [accumulation.FIGURES[0](), clocks.FIGURES[0]()]
    )
    assert tiny.run("figures") == 1
    out = capsys.readouterr().out
    assert "F1   PARTS" in out
    assert "F12  agrees" in out
    assert "2 figures, F1 parts from what was published." in out


def test_a_number_that_is_none_agrees_with_nothing() -> None:
    assert not close(float("nan"), 1.0, within=9.0)
    assert not all_of([1.0], [1.0, 2.0], within=9.0)
    assert entries({"a": None, "b": True, "c": [1, 2.5]}) == "a -; b yes; c 1 2.5"
