"""`--observe` records everything that can be observed, and the run is the same."""

import json
from pathlib import Path

import tiny
import torch

from midstep.records import UpdateRecord

ALWAYS = {"clip_max_norm", "decay_exponent", "stage_seconds"}
AT_TIMES = {
    "grad_norms", "grad_norms_by_group", "update_norm", "update_norms", "weight_norms",
    "update_to_weight", "naive_update_norm", "memory_bytes",
}  # fmt: skip
ON_REQUEST = {
    "grad_largest", "grad_largest_in", "grad_zeros", "grad_zeros_by_tensor", "moments",
    "microbatch_grad_norms", "noise_scale", "noise_scale_low", "noise_scale_high",
    "noise_scale_unit",
}  # fmt: skip


def fields(folder: Path) -> list[set[str]]:
    """What each record holds beside the fields of every record."""
    known = set(UpdateRecord.__dataclass_fields__)
    text = (folder / "updates.jsonl").read_text()
    return [set(json.loads(line)) - known for line in text.splitlines()]


def test_a_cheap_set_is_recorded_in_any_case(tmp_path: Path) -> None:
    recipe = tiny.write(tmp_path / "mine.py")
    assert tiny.run("train", recipe, "--out", tmp_path / "run") == 0
    for update, found in enumerate(fields(tmp_path / "run"), start=1):
        assert found == (ALWAYS | AT_TIMES if update % 10 == 0 else ALWAYS)


def test_everything_is_recorded_at_every_update_when_asked_and_no_weight_differs(
    tmp_path: Path,
) -> None:
    recipe = tiny.write(tmp_path / "mine.py")
    assert tiny.run("train", recipe, "--out", tmp_path / "plain") == 0
    assert tiny.run("train", recipe, "--observe", "--out", tmp_path / "seen") == 0
    first, *others = fields(tmp_path / "seen")
    assert first >= (ALWAYS | AT_TIMES | ON_REQUEST) - {"noise_scale_low", "noise_scale_high"}
    for found in others:
        assert found - {"outlier_microbatch"} == ALWAYS | AT_TIMES | ON_REQUEST
    plain, seen = tiny.weights(tmp_path / "plain"), tiny.weights(tmp_path / "seen")
    assert all(torch.equal(plain[name], seen[name]) for name in plain)


def test_a_resumed_run_is_observed_as_the_uninterrupted_one(tmp_path: Path) -> None:
    stopping = tiny.at_microbatch(25, "os.kill(os.getpid(), signal.SIGTERM)")
    counting = tiny.COUNTING
    recipe = tiny.write(tmp_path / "mine.py")
    assert tiny.run("train", recipe, "--observe", "--out", tmp_path / "whole") == 0
    tiny.write(recipe, counting, stopping)
    assert tiny.run("train", recipe, "--observe", "--out", tmp_path / "parts") == 128 + 15
    tiny.write(recipe)
    assert tiny.run("train", "--resume", tmp_path / "parts") == 0
    assert tiny.same_end(tmp_path / "whole", tmp_path / "parts")
    lows = [line.get("noise_scale_low", 0.0) for line in tiny.lines(tmp_path / "parts")]
    assert len(set(lows)) > 5  # what is averaged goes on after the break


def test_a_run_may_go_on_without_being_observed(tmp_path: Path) -> None:
    recipe = tiny.write(
        tmp_path / "mine.py",
        tiny.COUNTING,
        tiny.at_microbatch(25, "os.kill(os.getpid(), signal.SIGTERM)"),
    )
    folder = tmp_path / "run"
    assert tiny.run("train", recipe, "--observe", "--out", folder) == 128 + 15
    observed = len(fields(folder))
    tiny.write(recipe)
    assert tiny.run("train", "--resume", folder, "--no-observe") == 0
    assert "moments" in fields(folder)[observed - 1]
    assert not any("moments" in found for found in fields(folder)[observed:])
