"""Advice on the batch, against the law it rests on."""

import math
from pathlib import Path

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from midstep.choosing import advise_batch


@given(noise=st.floats(1.0, 1e8), batch=st.floats(1.0, 1e8))
def test_updates_and_targets_follow_the_law_of_the_noise_scale(noise: float, batch: float) -> None:
    advice = advise_batch([noise], [noise], [noise], batch)
    for choice in advice.choices:
        updates = (1 + noise / choice.batch) / (1 + noise / batch)
        assert choice.updates == pytest.approx(updates)
        # Targets are updates times batch.
        assert choice.targets == pytest.approx(updates * choice.batch / batch)


@pytest.mark.parametrize(
    ("batch", "words"),
    [(100.0, "Doubling still pays"), (1000.0, "is a trade"), (5000.0, "no longer pays")],
)
def test_the_interval_decides_what_is_said(batch: float, words: str) -> None:
    advice = advise_batch([1000.0], [800.0], [1300.0], batch)
    assert words in "\n".join(advice.lines())


def test_the_last_estimates_count_and_gaps_do_not() -> None:
    noise = [*[10.0] * 50, *[math.nan, 1000.0] * 20]
    advice = advise_batch(noise, noise, noise, 100.0)
    assert advice.noise_scale == 1000.0
    with pytest.raises(ValueError, match="no noise scale"):
        advise_batch([math.nan], [math.nan], [math.nan], 100.0)


def test_the_command_reads_the_noise_scale_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny.write(tmp_path / "mine.py")
    out = tmp_path / "run"
    assert tiny.run("train", str(recipe), "--steps", "60", "--observe", "--out", str(out)) == 0
    capsys.readouterr()
    code = tiny.run("batch", str(out))
    captured = capsys.readouterr()
    if code == 0:
        assert "noise scale" in captured.out
        assert "as trained" in captured.out
    else:  # on random labels there may be no gradient beneath the noise
        assert "no noise scale" in captured.err
