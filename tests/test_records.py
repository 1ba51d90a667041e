"""Records survive JSON to the last bit, and print as one line."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_loop import classifier, loss_sum, num_targets, pairs

import midstep as ms

ANY_FLOAT = st.floats(allow_nan=False)
NUMBERS = st.one_of(st.integers(0, 10**12), st.floats(0, allow_nan=False, allow_infinity=False))
TERMS = st.text("abcxyz_ /.", min_size=1, max_size=8)


def record_of(**changes: Any) -> ms.UpdateRecord:
    plain: dict[str, Any] = {
        "update": 3,
        "step": 2,
        "verdict": ms.Verdict.APPLIED,
        "num_microbatches": 4,
        "denominators": {"loss": 512},
        "loss_means": {"loss": 2.5},
        "loss_mean": 2.5,
        "grad_norm": 2.0,
        "clip_coefficient": 0.5,
        "clipped": True,
        "lr": [3e-4],
        "loss_scale": 1.0,
        "num_nonfinite": 0,
        "seconds": 0.125,
    }
    return ms.UpdateRecord(**(plain | changes))


RECORDS = st.builds(
    record_of,
    update=st.integers(1, 10**9),
    step=st.integers(0, 10**9),
    verdict=st.sampled_from(list(ms.Verdict)),
    num_microbatches=st.integers(0, 10**6),
    denominators=st.dictionaries(TERMS, NUMBERS, max_size=3),
    loss_means=st.dictionaries(TERMS, st.none() | ANY_FLOAT, max_size=3),
    loss_mean=st.none() | ANY_FLOAT,
    grad_norm=st.none() | ANY_FLOAT,
    clip_coefficient=st.none() | ANY_FLOAT,
    clipped=st.booleans(),
    lr=st.lists(ANY_FLOAT, min_size=1, max_size=3),
    loss_scale=st.floats(1e-30, 1e38),
    num_nonfinite=st.integers(0, 10**12),
    seconds=st.floats(0, 1e6),
    extra=st.dictionaries(st.sampled_from(["x", "memory_bytes"]), st.integers() | ANY_FLOAT),
)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@given(record=RECORDS)
def test_a_record_is_one_line_of_strict_json_and_comes_back_equal(record: ms.UpdateRecord) -> None:
    line = record.to_json()
    assert "\n" not in line
    json.loads(line, parse_constant=refuse)
    again = ms.UpdateRecord.from_json(line)
    assert again == record
    assert again.to_json() == line
    # Whole numbers stay whole: a count of 512 is not one of 512.0.
    for term, count in record.denominators.items():
        assert type(again.denominators[term]) is type(count)


@given(record=RECORDS)
def test_a_record_prints_as_one_line_whatever_it_holds(record: ms.UpdateRecord) -> None:
    line = str(record)
    assert "\n" not in line
    assert line.startswith(f"update {record.update} ")
    assert line.endswith(" s")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_has_a_spelling(value: float) -> None:
    record = record_of(grad_norm=value, loss_means={"a": value}, lr=[value], extra={"x": [value]})
    line = record.to_json()
    json.loads(line, parse_constant=refuse)
    again = ms.UpdateRecord.from_json(line)
    for found in (again.grad_norm, again.loss_means["a"], again.lr[0], again.extra["x"][0]):
        assert isinstance(found, float)
        assert repr(found) == repr(value)


def test_fields_of_a_later_version_are_kept_aside() -> None:
    values = json.loads(record_of().to_json()) | {"temperature": 0.7}
    record = ms.UpdateRecord.from_json(json.dumps(values))
    assert record.extra == {"temperature": 0.7}
    assert dataclasses.replace(record, extra={}) == record_of()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            (
                "update 3 applied | loss 2.5000 | norm 2.000 clipped x0.500 | lr 3.00e-04 | "
                "512 targets in 4 microbatches | 0.125 s"
            ),
        ),
        (
            {"clipped": False, "clip_coefficient": 1.0, "denominators": {"loss": 65_536}},
            (
                "update 3 applied | loss 2.5000 | norm 2.000 | lr 3.00e-04 | "
                "65,536 targets in 4 microbatches | 0.125 s"
            ),
        ),
        (
            {"clip_coefficient": None, "grad_norm": 1.5e6, "lr": [1e-3, 0.1]},
            (
                "update 3 applied | loss 2.5000 | norm 1.5e+06 clipped | lr 1.00e-03 1.00e-01 | "
                "512 targets in 4 microbatches | 0.125 s"
            ),
        ),
        (
            {
                "verdict": ms.Verdict.SKIPPED_NONFINITE,
                "grad_norm": math.inf,
                "num_nonfinite": 1234,
                "loss_scale": 65536.0,
                "clipped": False,
            },
            (
                "update 3 skipped (nonfinite) | loss 2.5000 | norm inf | 1,234 non-finite | "
                "lr 3.00e-04 | scale 65536 | 512 targets in 4 microbatches | 0.125 s"
            ),
        ),
        (
            {
                "verdict": ms.Verdict.SKIPPED_EMPTY,
                "loss_mean": None,
                "loss_means": {"loss": None},
                "grad_norm": None,
                "clipped": False,
                "denominators": {"lm": 0, "aux": 2.5},
            },
            "update 3 skipped (empty) | lr 3.00e-04 | 0 lm, 2.5 aux in 4 microbatches | 0.125 s",
        ),
    ],
)
def test_a_record_reads_well(changes: dict[str, Any], line: str) -> None:
    assert str(record_of(**changes)) == line


@pytest.mark.parametrize("verdict", list(ms.Verdict))
def test_only_one_verdict_is_applied(verdict: ms.Verdict) -> None:
    assert verdict.applied is (verdict == "applied")
    assert record_of(verdict=verdict).applied is verdict.applied


def test_a_record_of_a_real_update_says_what_happened() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(1e-3), schedule=lambda _: 0.5)
    batches = pairs(3, 4)
    record = updater.update(batches, loss_sum, count=ms.targets())
    assert record.verdict == "applied"
    assert (record.update, record.step, record.num_microbatches) == (1, 1, 2)
    assert record.denominators == {"loss": sum(map(num_targets, batches))}
    assert record.lr == [0.05]
    assert record.clipped
    assert record.grad_norm is not None
    assert record.clip_coefficient == pytest.approx(1e-3 / record.grad_norm)
    assert (record.loss_scale, record.num_nonfinite) == (1.0, 0)
    assert ms.UpdateRecord.from_json(record.to_json()) == record
