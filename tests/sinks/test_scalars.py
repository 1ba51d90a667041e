"""Every number of a record has one name, and what it does not hold has none."""

import math
from typing import Any

import pytest
from observing import run
from plain_loop import classifier
from test_records import record_of
from torch.optim import AdamW

import midstep as ms
from midstep.observers import Entries, GradNorms, Memory, Microbatches, Moments, Stages, Updates
from midstep.sinks import scalars_of


def test_a_bare_record_has_the_usual_names() -> None:
    assert scalars_of(record_of()) == {
        "train/loss": 2.5,
        "train/grad_norm": 2.0,
        "train/clip_coefficient": 0.5,
        "train/clipped": 1.0,
        "train/applied": 1.0,
        "train/num_nonfinite": 0.0,
        "train/loss_scale": 1.0,
        "train/step": 2.0,
        "train/num_microbatches": 4.0,
        "train/lr": 3e-4,
        "train/targets": 512.0,
        "perf/targets_per_second": 4096.0,
        "perf/seconds": 0.125,
    }


def test_several_terms_and_rates_are_told_apart() -> None:
    found = scalars_of(
        record_of(
            loss_means={"lm": 2.0, "aux": None}, denominators={"lm": 5, "aux": 0}, lr=[0.1, 0.2]
        )
    )
    assert found["train/loss_lm"] == 2.0
    assert "train/loss_aux" not in found
    assert (found["train/lr_group0"], found["train/lr_group1"]) == (0.1, 0.2)
    assert (found["train/targets_lm"], found["train/targets_aux"]) == (5.0, 0.0)


@pytest.mark.parametrize("same", [[0.1, 0.1]])
def test_rates_that_are_one_have_one_name(same: list[float]) -> None:
    assert scalars_of(record_of(lr=same))["train/lr"] == 0.1


def test_an_empty_update_has_no_loss_and_no_norm() -> None:
    empty: dict[str, Any] = dict.fromkeys(["loss_mean", "grad_norm", "clip_coefficient"])
    found = scalars_of(record_of(**empty, loss_means={"loss": None}, denominators={"loss": 0}))
    assert not {"train/loss", "train/grad_norm", "train/clip_coefficient"} & found.keys()


def test_what_observers_add_is_in_sections_of_its_own() -> None:
    model = classifier()
    observers = [
        kind() for kind in (Entries, GradNorms, Memory, Microbatches, Moments, Stages, Updates)
    ]
    updater = ms.Updater(
        model, AdamW(model.parameters()), clip=ms.ByGlobalNorm(1.0), observers=observers
    )
    (record,) = run(updater)
    found = scalars_of(record)
    assert found["grad_norm/0.weight"] == record.extra["grad_norms"]["0.weight"]
    assert found["update_to_weight/2.bias"] == record.extra["update_to_weight"]["2.bias"]
    assert found["moment_first/0.bias"] == record.extra["moments"]["0.bias"]["first"]
    assert found["perf/seconds_backward"] == record.extra["stage_seconds"]["backward"]
    assert found["grad_norm_by_group/0"] == pytest.approx(record.grad_norm)
    assert found["train/microbatch_grad_norm_max"] == max(record.extra["microbatch_grad_norms"])
    sections = {name.partition("/")[0] for name in found}
    assert sections == {
        "train", "perf", "grad_norm", "grad_norm_by_group", "grad_zeros", "update_norm",
        "update_to_weight", "weight_norm", "moment_first", "moment_second",
    }  # fmt: skip
    assert all(isinstance(value, float) and not math.isnan(value) for value in found.values())
