"""On an accelerator what observers measure stays there until a field of the record is read.

Without one the same claim is made of tensors in host memory that say they are elsewhere, so that
every way for accelerators is taken.
"""

from typing import Any

import pytest
import torch
from plain_loop import classifier, loss_sum, pairs
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
    Stages,
    Updates,
)
from midstep.observers.readings import Unread

ON_ANY_DEVICE = (Entries, GradNorms, Microbatches, Moments, NoiseScale, Updates)


def run(device: str, observers: list[Observer]) -> list[ms.UpdateRecord]:
    """Three updates, the last with a microbatch that stands out; float64 on any device."""
    model = classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    updater = ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(0.1), observers=observers)
    records = []
    for seed in range(3):
        batches = [(x.to(device), y.to(device)) for x, y in pairs(3, 2, 4, seed=seed)]
        records.append(updater.update(batches, loss_sum, count=ms.targets()))
    return records


class Reads:
    """Counts how often numbers are brought to the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = 0
        for name in ("tolist", "item"):
            monkeypatch.setattr(Tensor, name, self._counted(getattr(Tensor, name)))

    def _counted(self, read: Any) -> Any:
        def counted(tensor: Tensor) -> Any:
            self.num += 1
            return read(tensor)

        return counted


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda _: False))


def reads_of(device: str, observers: list[Observer]) -> tuple[int, list[int], Any]:
    """Reads of three updates, of reading each record once and of reading it again; the fields."""
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            elsewhere(patch)
        reads = Reads(patch)
        records = run(device, observers)
        during, after = reads.num, []
        assert all(isinstance(r.extra, Unread) for r in records if len(observers))
        for record in [*records, *records]:
            before = reads.num
            dict(record.extra)
            after.append(reads.num - before)
        return during, after, [dict(record.extra) for record in records]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_host_reads_nothing_until_a_field_is_read_and_then_once(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            elsewhere(patch)
        reads = Reads(patch)
        run(device, [])
        without = reads.num
    during, after, _ = reads_of(device, [Entries(), Microbatches(), Moments(), Updates()])
    assert during == without
    assert after == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_the_numbers_are_those_of_the_host(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    *_, found = reads_of(device, [kind() for kind in ON_ANY_DEVICE])
    wanted = [record.extra for record in run("cpu", [kind() for kind in ON_ANY_DEVICE])]
    for fields, there in zip(found, wanted, strict=True):
        assert fields.keys() == there.keys()
        for name, value in there.items():
            if name == "moments":
                for tensor, moments in value.items():
                    assert fields[name][tensor] == pytest.approx(moments, rel=1e-9)
            elif isinstance(value, str):
                assert fields[name] == value
            else:
                assert fields[name] == pytest.approx(value, rel=1e-9), name


@pytest.mark.parametrize("device", DEVICES)
def test_the_noise_scale_is_brought_up_to_date_in_the_order_of_the_updates(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            elsewhere(patch)
        observer = NoiseScale()
        records = run(device, [observer])
        found = [dict(record.extra) for record in reversed(records)][::-1]
        state = observer.state_dict()
    fresh = NoiseScale()
    wanted = [dict(record.extra) for record in run("cpu", [fresh])]
    for fields, there in zip(found, wanted, strict=True):
        unit = there.pop("noise_scale_unit")
        assert fields.pop("noise_scale_unit") == unit
        assert fields.pop("decay_exponent") == there.pop("decay_exponent")
        assert fields == pytest.approx(there, rel=1e-9)
    assert state == pytest.approx(fresh.state_dict(), rel=1e-9)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_time_and_memory_are_those_of_the_device() -> None:
    records = run("cuda", [Memory(), Stages()])
    for record in records:
        assert isinstance(record.extra, Unread)
        stages = record.extra["stage_seconds"]
        assert list(stages) == ["data", "forward", "backward", "measure", "step"]
        assert all(seconds >= 0.0 for seconds in stages.values())
        assert sum(stages.values()) < 2.0 * record.seconds
        assert record.extra["memory_bytes"] == torch.cuda.max_memory_allocated()
