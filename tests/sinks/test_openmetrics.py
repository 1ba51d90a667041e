"""The text file that scrapers read is OpenMetrics to the letter, and never half written."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
from test_records import record_of

import midstep as ms
from midstep.sinks import OpenMetrics

parser = pytest.importorskip("prometheus_client.openmetrics.parser")

EXTRA = {
    "clip_max_norm": 1.0,
    "grad_norms": {"head.weight": 2.0, 'odd "name"\\\n': 1.0},
    "update_norm": 0.5,
    "naive_update_norm": 0.25,
    "update_to_weight": {"head.weight": 1e-3},
    "weight_norms": {"head.weight": 30.0},
    "grad_zeros": 0.125,
    "grad_zeros_by_tensor": {"head.weight": 0.5},
    "noise_scale": math.inf,
    "memory_bytes": 2**40 + 1,
    "stage_seconds": {"data": 0.1, "forward": 0.2},
}


def samples_of(path: Path) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What the parser of prometheus_client reads, which refuses what is not OpenMetrics."""
    families = parser.text_string_to_metric_families(path.read_text(encoding="utf-8"))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_number_is_read_back_by_the_parser_of_prometheus(tmp_path: Path) -> None:
    sink = OpenMetrics(tmp_path / "metrics" / "midstep.prom", labels={"run": "a b"})
    sink(record_of(extra=EXTRA, lr=[0.1, 0.2], loss_means={"lm": 2.0, "aux": 0.5}))
    found = samples_of(sink.path)
    run = ("run", "a b")

    def at(name: str, **labels: str) -> float:
        return found[f"midstep_{name}", tuple(sorted([run, *labels.items()]))]

    assert at("updates_total") == 3
    assert at("steps_total") == 2
    assert at("verdicts_total", verdict="applied") == 1
    assert at("clips_total") == 1
    assert at("microbatches_total") == 4
    assert at("targets_total", term="loss") == 512
    assert (at("loss", term="lm"), at("loss", term="aux")) == (2.0, 0.5)
    assert at("grad_norm") == 2.0
    assert at("clip_coefficient_ratio") == 0.5
    assert (at("learning_rate", group="0"), at("learning_rate", group="1")) == (0.1, 0.2)
    assert at("update_seconds") == 0.125
    assert at("clip_max_norm") == 1.0
    assert at("tensor_grad_norm", tensor='odd "name"\\\n') == 1.0
    assert at("tensor_update_ratio", tensor="head.weight") == 1e-3
    assert at("noise_scale") == math.inf
    assert at("memory_peak_bytes") == 2**40 + 1
    assert at("stage_seconds", stage="forward") == 0.2


def test_counters_of_the_process_add_up_and_those_of_the_run_follow_the_record(
    tmp_path: Path,
) -> None:
    sink = OpenMetrics(tmp_path / "midstep.prom")
    sink(record_of(update=101, step=99))
    skipped: dict[str, Any] = {"verdict": ms.Verdict.SKIPPED_NONFINITE, "clipped": False}
    sink(record_of(update=102, step=99, **skipped, clip_coefficient=None, grad_norm=math.nan))
    found = samples_of(sink.path)
    assert found["midstep_updates_total", ()] == 102
    assert found["midstep_steps_total", ()] == 99
    assert found["midstep_targets_total", (("term", "loss"),)] == 1024
    assert found["midstep_verdicts_total", (("verdict", "skipped_nonfinite"),)] == 1
    assert math.isnan(found["midstep_grad_norm", ()])
    assert ("midstep_clip_coefficient_ratio", ()) not in found


def test_a_reader_sees_a_whole_file_or_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = OpenMetrics(tmp_path / "midstep.prom")
    sink(record_of(update=1))
    before = sink.path.read_text()
    seen = []
    replace = os.replace

    def watched(source: Any, target: Any, **options: Any) -> None:
        seen.append(sink.path.read_text())
        replace(source, target, **options)

    monkeypatch.setattr(os, "replace", watched)
    monkeypatch.setattr(Path, "replace", watched)
    sink(record_of(update=2))
    assert seen == [before]
    assert sink.path.read_text().endswith("# EOF\n")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["midstep.prom"]


@pytest.mark.parametrize("label", ["", "a-b", "1a", "__a", "\u00e4"])
def test_a_label_that_the_format_does_not_take_is_refused(label: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no name of a label"):
        OpenMetrics(tmp_path / "midstep.prom", labels={label: "x"})
