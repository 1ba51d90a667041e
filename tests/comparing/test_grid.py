"""What a grid is made of, and what it refuses."""

import math
from pathlib import Path
from typing import Any

import pytest

from midstep.cli.options import Options, ScheduleName
from midstep.comparing.grid import Grid, Variant, parse_axis


def grid_of(**changes: Any) -> Grid:
    settings: dict[str, Any] = {
        "recipe": "digits",
        "axes": {"clip": [math.inf, 0.5], "lr": [1e-3, 3e-3, 1e-2]},
        "base": Options(steps=10),
        "num_seeds": 2,
        "path": Path("out"),
    }
    return Grid(**(settings | changes))


def test_every_combination_is_run_once_with_every_seed() -> None:
    cells = grid_of().cells(steps=lambda _: 10)
    assert len(cells) == 2 * 3 * 2
    assert len({cell.path for cell in cells}) == len(cells)
    assert {(cell.options.clip, cell.options.lr, cell.seed) for cell in cells} == {
        (clip, lr, seed) for clip in (math.inf, 0.5) for lr in (1e-3, 3e-3, 1e-2) for seed in (0, 1)
    }
    assert [cell.seed for cell in cells] == [0] * 6 + [1] * 6


def test_a_variant_has_a_name_that_is_also_a_folder() -> None:
    variant = Variant((("clip", math.inf), ("lr", 3e-3)))
    assert variant.name == "clip=none lr=0.003"
    assert variant.folder == "clip=none_lr=0.003"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr", "NAME=VALUE"),
        ("momentum=0.9", "NAME of clip, lr"),
        ("lr=fast", "cannot be read"),
        ("lr=0.1,0.10", "stands twice"),
        ("schedule=cosinus", "cannot be read"),
    ],
)
def test_an_axis_that_cannot_be_read_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_axis(text)


def test_what_is_varied_cannot_be_given_too() -> None:
    with pytest.raises(ValueError, match="both varied and given"):
        grid_of(base=Options(lr=0.1))
    with pytest.raises(ValueError, match="nothing is varied"):
        grid_of(axes={})
    with pytest.raises(ValueError, match="at least 1"):
        grid_of(num_seeds=0)


def test_a_warm_up_may_be_common_to_schedules_that_are_varied() -> None:
    axes = {"schedule": [ScheduleName.COSINE, ScheduleName.LINEAR]}
    cells = grid_of(axes=axes, common={"warmup": 3}).cells(steps=lambda _: 10)
    assert {(cell.options.schedule, cell.options.warmup) for cell in cells} == {
        (ScheduleName.COSINE, 3),
        (ScheduleName.LINEAR, 3),
    }
    with pytest.raises(ValueError, match="both varied and given"):
        grid_of(axes={"warmup": [1, 2]}, common={"warmup": 3})
    with pytest.raises(ValueError, match="without `--schedule`"):
        grid_of(axes={"lr": [0.1]}, common={"warmup": 3}).cells(steps=lambda _: 10)
