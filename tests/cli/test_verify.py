"""`midstep verify` as its user meets it: the page, the JSON, the exit codes, the one line."""

import json
from pathlib import Path

import pytest
import tiny

SOUND = ("torch.nn.Dropout(0.3)", "torch.nn.Tanh()")


def test_a_sound_recipe_is_certified_with_exit_code_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.run("verify", tiny.write(tmp_path / "tiny.py", SOUND)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("EQUAL: ")
    words = " ".join(out.split())
    assert "8 rows" in words
    assert "next update by AdamW after ByGlobalNorm(max_norm=0.5, p=2.0)" in words
    assert words.count("told apart") == 3
    assert max(map(len, out.splitlines())) <= 100


def test_what_breaks_it_is_named_with_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tiny.write(tmp_path / "tiny.py", ("torch.nn.Dropout(0.3)", "torch.nn.BatchNorm1d(8)"))
    assert tiny.run("verify", file, "--rows", 12) == 1
    out = capsys.readouterr().out
    assert out.startswith("NOT EQUAL: ")
    assert "`1` (BatchNorm1d" in out
    assert tiny.run("verify", file, "--evaluation") == 0


def test_json_holds_what_the_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tiny.write(tmp_path / "tiny.py")
    assert tiny.run("verify", file, "--format", "json", "--rows", 6) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["outcome"] == "not equal"
    assert found["num_rows"] == 6
    assert [reason["kind"] for reason in found["reasons"]] == ["draws"]
    cuts = [comparison["cut"] for comparison in found["comparisons"]]
    assert cuts == ["halves", "ones", "uneven", "permuted"]


def test_the_seed_decides_the_weights_and_the_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tiny.write(tmp_path / "tiny.py", SOUND)
    pages = []
    for seed in (3, 3, 4):
        tiny.run("verify", file, "--seed", seed)
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1] != pages[2]


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        (("--rows", 2), SOUND, "at least 3"),
        ((), (tiny.LOSS, "model(batch[0])"), "only a number can be summed"),
        ((), (tiny.LOSS, "ms.cross_entropy(model(batch[0]), batch[1]).sum * 0"), "is zero"),
        ((), ("train=loader", "train=[]"), "nothing to verify"),
        ((), ("lr=0.01", "lr=-1.0"), "tiny.py:14"),
    ],
)
def test_what_cannot_be_checked_is_one_line_and_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[object, ...],
    change: tuple[str, str],
    words: str,
) -> None:
    assert tiny.run("verify", tiny.write(tmp_path / "tiny.py", change), *options) == 2
    assert words in tiny.one_line(capsys)


def test_an_unknown_recipe_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.run("verify", "languages") == 2
    assert "Did you mean `language`" in tiny.one_line(capsys)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [("digits", "layers", "features.1"), ("pairs", "loss", "by_row = F.cross_entropy(")],
)
def test_the_built_in_recipes_that_do_not_add_up_say_why(
    capsys: pytest.CaptureFixture[str], name: str, kind: str, words: str
) -> None:
    if name == "digits":
        pytest.importorskip("sklearn")
    assert tiny.run("verify", name, "--rows", 6, "--format", "json") == 1
    (reason,) = json.loads(capsys.readouterr().out)["reasons"]
    assert reason["kind"] == kind
    assert words in reason["what"]
