"""Observers look when they are due, change nothing, and cost nothing when they are not."""

import json
import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from observing import calls_of, run
from plain_loop import classifier, loss_sum, pairs, weights
from torch import Tensor

import midstep as ms
from midstep.observers import (
    Entries,
    GradNorms,
    Memory,
    Microbatches,
    Moments,
    NoiseScale,
    Observer,
    Reading,
    Stages,
    Updates,
)
from midstep.observers.readings import Unread, fields_of

EVERY = [Entries, GradNorms, Memory, Microbatches, Moments, NoiseScale, Stages, Updates]


def all_of(every: int = 1) -> list[Observer]:
    return [kind(every=every) for kind in EVERY]


def updater_of(observers: Sequence[Observer] = (), **options: Any) -> ms.Updater:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(0.1), observers=observers, **options)


def test_without_observers_and_in_updates_that_are_not_due_nothing_is_computed() -> None:
    without = calls_of(updater_of())
    assert without["aten.addmm.default"] > 0
    assert calls_of(updater_of(all_of(every=3))) == without
    assert calls_of(updater_of(all_of(every=2))) != without


def test_no_hook_is_left_when_nobody_is_due() -> None:
    updater = updater_of(all_of(every=2))
    parameters = list(updater.model.parameters())
    seen = []

    def loss(model: Any, batch: Any) -> Tensor:
        seen.append([len(p._backward_hooks or ()) for p in parameters])
        return loss_sum(model, batch)

    for seed in range(3):
        updater.update(pairs(3, 2, seed=seed), loss, count=ms.targets())
        assert not any(p._backward_hooks for p in parameters)
    assert seen == [[0] * 4, [0] * 4, [1] * 4, [1] * 4, [0] * 4, [0] * 4]


def test_a_window_that_is_dropped_leaves_no_hook() -> None:
    updater = updater_of(all_of())
    for window in updater.windows(pairs(3, 2, 2), size=3):
        for batch in window:
            window.backward(ms.cross_entropy(updater.model(batch[0]), batch[1]))
            break
        break
    assert not any(p._backward_hooks for p in updater.model.parameters())
    assert run(updater)[0].extra["microbatch_grad_norms"]


def test_observers_change_no_bit_of_the_run() -> None:
    plain, observed = updater_of(), updater_of(all_of())
    for a, b in zip(run(plain, 4), run(observed, 4), strict=True):
        assert a.grad_norm == b.grad_norm
        assert a.loss_mean == b.loss_mean
    for a, b in zip(weights(plain.model), weights(observed.model), strict=True):
        assert torch.equal(a, b)


def test_an_observer_looks_at_every_nth_update() -> None:
    updater = updater_of([GradNorms(every=3), Memory(every=2)])
    found = [sorted(record.extra) for record in run(updater, 6)]
    norms, memory = ["grad_norms", "grad_norms_by_group"], ["memory_bytes"]
    always = ["clip_max_norm", "decay_exponent"]
    assert found == [
        always,
        [*always, *memory],
        [*always, *norms],
        [*always, *memory],
        always,
        [*always, *norms, *memory],
    ]


def test_the_fields_are_plain_and_come_back_from_a_line_of_json() -> None:
    (record,) = run(updater_of(all_of()))
    assert type(record.extra) is dict
    line = record.to_json()
    assert ms.UpdateRecord.from_json(line) == record
    assert set(json.loads(line)) >= {
        "clip_max_norm", "grad_norms", "grad_norms_by_group", "grad_largest", "grad_largest_in",
        "grad_zeros", "grad_zeros_by_tensor", "update_norm", "update_norms", "weight_norms",
        "update_to_weight", "naive_update_norm", "microbatch_grad_norms", "noise_scale",
        "noise_scale_unit", "moments", "memory_bytes", "stage_seconds",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("clip", "threshold"),
    [
        (ms.ByGlobalNorm(0.25), 0.25),
        (ms.ByGlobalNorm(lambda step: 0.5 / (1 + step)), 0.5),
        (ms.Chain(ms.ByValue(1.5), ms.ByGlobalNorm(0.25)), 1.5),
        (ms.ByGlobalNorm(float("inf")), None),
        (None, None),
    ],
)
def test_the_threshold_of_the_rule_is_always_in_the_record(
    clip: Any, threshold: float | None
) -> None:
    model = classifier()
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), clip=clip)
    (record,) = run(updater)
    assert record.extra.get("clip_max_norm") == threshold


class Points(Observer):
    """Notes the points at which it is called."""

    watches_microbatches = True

    def __init__(self, *, every: int = 1) -> None:
        super().__init__(every=every)
        self.seen: list[str] = []

    def begin(self, subject: Any, window: Any, started: float) -> None:
        self.seen.append("begin")

    def on_batch(self, index: int) -> None:
        self.seen.append(f"batch {index}")

    def before_backward(self, index: int) -> None:
        self.seen.append(f"before {index}")

    def after_backward(self, index: int) -> None:
        self.seen.append(f"after {index}")

    def on_gradients(self, gradients: Any) -> None:
        self.seen.append("gradients")

    def before_step(self, gradients: Any) -> None:
        self.seen.append("step")

    def after_step(self, gradients: Any) -> None:
        self.seen.append("stepped")

    def read(self) -> list[Reading]:
        self.seen.append("read")
        return []

    def end(self) -> None:
        self.seen.append("end")


BATCHES = ["batch 0", "before 0", "after 0", "batch 1", "before 1", "after 1"]


def test_the_points_come_in_the_order_of_the_update() -> None:
    points = Points()
    updater = updater_of([points])
    updater.update(pairs(3, 2), loss_sum, count=ms.targets())
    ends = ["gradients", "step", "stepped", "read", "end"]
    assert points.seen == ["begin", *BATCHES, *ends]


def test_a_skipped_update_has_no_step_and_is_read_all_the_same() -> None:
    points = Points()
    updater = updater_of([points, GradNorms()], nonfinite=ms.Skip(max_consecutive=3))
    with torch.no_grad():
        updater.model[0].weight[0, 0] = float("nan")
    record = updater.update(pairs(3, 2), loss_sum, count=ms.targets())
    assert record.verdict is ms.Verdict.SKIPPED_NONFINITE
    assert points.seen == ["begin", *BATCHES, "gradients", "read", "end"]
    assert str(record.extra["grad_norms"]["0.weight"]) == "nan"


def test_the_search_for_a_bad_microbatch_is_not_observed() -> None:
    points = Points()
    updater = updater_of([points, Microbatches()])
    batches = pairs(3, 2)
    batches[1][0][0, 0] = float("inf")
    with pytest.raises(ms.NonFiniteGradient) as caught:
        updater.update(batches, loss_sum, count=ms.targets())
    assert caught.value.microbatch == 1
    assert points.seen == ["begin", *BATCHES, "gradients", "end"]
    assert not any(p._backward_hooks for p in updater.model.parameters())


def test_parameters_that_join_later_are_observed() -> None:
    updater = updater_of(all_of())
    run(updater)
    head = torch.nn.Linear(3, 3).double()
    updater.model.append(head)
    updater.optimizer.add_param_group({"params": head.parameters(), "lr": 0.1})
    (record,) = run(updater)
    assert "3.weight" in record.extra["grad_norms"]
    assert len(record.extra["grad_norms_by_group"]) == 2
    assert "3.bias" in record.extra["update_norms"]


def test_what_an_observer_remembers_is_saved_with_the_run() -> None:
    updater = updater_of([NoiseScale()])
    run(updater, 3)
    state = updater.state_dict()
    again, fresh = updater_of([Memory(), NoiseScale()]), updater_of([Memory()])
    again.load_state_dict(state)
    fresh.load_state_dict(state)  # what nobody remembers is left
    assert again.state_dict()["observers"] == state["observers"]
    assert list(state["observers"]) == ["NoiseScale"]
    old = updater_of([NoiseScale()])
    old.load_state_dict({k: v for k, v in state.items() if k != "observers"})


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("every", [0, -1, True, float("nan")])
def test_a_number_of_updates_below_one_is_refused(kind: Any, every: Any) -> None:
    with pytest.raises(ValueError, match=rf"`{kind.__name__}\(every={every!r}\)`"):
        kind(every=every)


def test_what_is_no_observer_is_refused() -> None:
    with pytest.raises(TypeError, match="is no observer"):
        updater_of([print])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="is no observer"):
        updater_of([GradNorms])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="two of kind `GradNorms`"):
        updater_of([GradNorms(), GradNorms(every=2)])


class OnDevice(Tensor):
    """A tensor that says it is not in host memory, and counts how often it is brought there."""

    num_reads = 0

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def tolist(self) -> list[float]:
        OnDevice.num_reads += 1
        return self.as_subclass(Tensor).tolist()


def test_numbers_stay_on_the_device_until_the_first_field_is_read() -> None:
    OnDevice.num_reads = 0
    first = torch.tensor([1.0, 2.0]).as_subclass(OnDevice)
    second = torch.tensor([3.0]).as_subclass(OnDevice)
    waited: list[int] = []

    def wait() -> list[float]:
        waited.append(1)
        return [4.0]

    fields = fields_of(
        [
            Reading(first, lambda x: {"a": list(x)}),
            Reading(second, lambda x: {"b": x[0]}),
            Reading(wait, lambda x: {"c": x[0]}),
            Reading([5.0], lambda x: {"d": x[0]}),
        ],
        {"known": 1},
    )
    assert isinstance(fields, Unread)
    assert not waited
    assert OnDevice.num_reads == 0
    assert fields["b"] == 3.0
    whole = {"known": 1, "a": [1.0, 2.0], "b": 3.0, "c": 4.0, "d": 5.0}
    assert fields == whole
    assert repr(fields) == repr(whole)
    assert len(fields) == 5
    assert pickle.loads(pickle.dumps(fields)) == whole
    assert (OnDevice.num_reads, waited) == (1, [1])


def test_observing_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(updater_of(all_of()), 2)
