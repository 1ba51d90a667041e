"""`midstep lr-range`: bounds in words, as JSON and as a picture; and what it refuses."""

import itertools
import json
import math
from pathlib import Path

import pytest
import tiny

LEARNS = (
    "y = torch.randn(48, 4), torch.randint(0, 3, (48,))",
    "y = (z := torch.randn(48, 4)), z[:, :3].argmax(1)",
)
LEARNS_NOTHING = (tiny.LOSS, "0 * model(batch[0]).sum() + batch[0].sum()")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return str(tiny.write(tmp_path / "mine.py", LEARNS))


def test_bounds_are_printed_with_what_each_is_for(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.run("lr-range", recipe, "--updates", "120", "--start", "1e-5") == 0
    out = capsys.readouterr().out
    for words in (
        "lower",
        "steepest",
        "peak of a cosine",
        "ceiling",
        "not an optimum",
        "The recipe's own rate, 1.0e-02, is",
    ):
        assert words in out


def test_json_holds_bounds_and_curves_and_the_picture_is_drawn(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "lr-range",
        recipe,
        "--updates",
        "80",
        "--start",
        "1e-5",
        "--repeats",
        "2",
        "--json",
    ]
    for name in ("curve.png", "curve.svg", "curve.html"):
        assert tiny.run(*arguments, "--picture", str(tmp_path / name)) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["lower"]["lr"] <= found["upper"]["lr"]
        assert len(found["curves"]) == 2
        rates = found["curves"][0]["lr"]
        factor = 1e6 ** (1 / 79)
        assert all(math.isclose(b / a, factor) for a, b in itertools.pairwise(rates))
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "lower" in (tmp_path / "curve.svg").read_text()
    page = (tmp_path / "curve.html").read_text()
    assert "vega" in page
    assert 'src="http' not in page


def test_no_descent_is_an_answer_and_its_exit_code_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(tiny.write(tmp_path / "flat.py", LEARNS_NOTHING))
    assert tiny.run("lr-range", recipe, "--updates", "40") == 1
    out = capsys.readouterr().out
    assert "no descent" in out
    assert "lower" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--updates", "5"], "fewer than 12 points"),
        (["--start", "1", "--end", "0.1"], "rise from a positive"),
        (["--start", "0"], "rise from a positive"),
        (["--repeats", "0"], "at least 1 repeat"),
        (["--picture", "curve.gif"], ".png, .svg, .html"),
        (["--picture", "no/such/folder/curve.png"], "no such folder"),
        (["--size", "1", "--rows", "1"], "exclude each other"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    recipe: str, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert tiny.run("lr-range", recipe, *arguments) == 2
    assert words in tiny.one_line(capsys)
