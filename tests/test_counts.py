"""Counts are torch's own denominators: sum / count is what `reduction="mean"` gives."""

from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import midstep as ms


@given(
    rows=st.integers(1, 4),
    time=st.integers(1, 5),
    shift=st.booleans(),
    weighted=st.booleans(),
    ignore_index=st.sampled_from([-100, 0, -1]),
    seed=st.integers(0, 1_000),
)
def test_sum_over_targets_is_torchs_mean_cross_entropy(
    *, rows: int, time: int, shift: bool, weighted: bool, ignore_index: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, time, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (rows, time), generator=generator)
    labels[torch.rand(rows, time, generator=generator) < 0.3] = ignore_index
    weight = torch.rand(3, generator=generator, dtype=torch.float64) if weighted else None
    count = ms.targets(ignore_index=ignore_index, shift=shift, weight=weight)(labels)
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    settings: dict[str, Any] = {"ignore_index": ignore_index, "weight": weight}
    scores, flat = logits.reshape(-1, 3), labels.reshape(-1)
    total = F.cross_entropy(scores, flat, reduction="sum", **settings).item()
    if count == 0:
        assert not (flat != ignore_index).any()
        return
    assert total / count == pytest.approx(F.cross_entropy(scores, flat, **settings).item())
    assert isinstance(count, float if weighted else int)


LABELS = torch.tensor([[1, 2, -100], [-100, 0, 4]])


@pytest.mark.parametrize(
    ("batch", "key"),
    [
        (LABELS, None),
        ((torch.zeros(2), LABELS), None),
        ([torch.zeros(2), LABELS], None),
        ({"x": torch.zeros(2), "labels": LABELS}, None),
        ({"x": torch.zeros(2), "label": LABELS}, None),
        ({"x": torch.zeros(2), "targets": LABELS}, None),
        ({"x": torch.zeros(2), "target": LABELS}, None),
        (UserDict({"labels": LABELS, "attention_mask": torch.ones(2, 3)}), None),
        ({"y": LABELS}, "y"),
        ((LABELS, torch.zeros(2)), 0),
        ((torch.zeros(2), LABELS, torch.zeros(3)), 1),
        ({"a": [LABELS]}, lambda batch: batch["a"][0]),
    ],
)
def test_labels_are_found_where_they_are(batch: Any, key: Any) -> None:
    assert ms.targets(key=key)(batch) == 4
    assert ms.elements(key=key)(batch) == 6


@pytest.mark.parametrize(
    ("batch", "key", "message"),
    [
        ({"x": LABELS}, None, "cannot tell where the labels are in a dict with 'x'"),
        ({"labels": LABELS, "target": LABELS}, None, "cannot tell"),
        ({"x": LABELS}, "labels", "no `'labels'` in a dict"),
        ((LABELS,), 1, "no `1` in a tuple"),
        (3.0, None, "cannot tell"),
        (3.0, "labels", "no `'labels'` in a float"),
        ((), None, "cannot tell"),
    ],
)
def test_labels_that_are_not_there_are_reported(batch: Any, key: Any, message: str) -> None:
    with pytest.raises(KeyError, match=message):
        ms.targets(key=key)(batch)


def test_probabilities_are_no_targets_to_count() -> None:
    with pytest.raises(TypeError, match="no class indices"):
        ms.targets()(torch.rand(3, 4))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_labels_may_be_any_whole_numbers(dtype: torch.dtype) -> None:
    labels = torch.tensor([[1, 2, 100], [100, 0, 4]]).to(dtype)  # 100, since -100 is no uint8
    assert ms.targets(ignore_index=100)(labels) == 4
    weight = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    assert ms.targets(ignore_index=100, weight=weight)(labels) == 1.0 + 2.0 + 4.0 + 16.0


def test_a_count_is_a_plain_number_that_needs_no_device() -> None:
    assert type(ms.targets()(LABELS)) is int
    assert type(ms.targets(weight=torch.ones(5))(LABELS)) is float
    assert type(ms.rows()(LABELS)) is int


def test_rows_and_elements_are_the_denominators_of_row_and_element_losses() -> None:
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    total = F.mse_loss(x, y, reduction="sum") / ms.elements()((x, y))
    assert total.item() == pytest.approx(F.mse_loss(x, y).item())
    each = F.mse_loss(x, y, reduction="none").sum(dim=1)
    assert (each.sum() / ms.rows()((x, y))).item() == pytest.approx(each.mean().item())


def test_a_shifted_count_of_one_position_is_nothing() -> None:
    assert ms.targets(shift=True)(torch.tensor([[1], [2]])) == 0


def test_large_sums_of_weights_are_exact_to_float64() -> None:
    weight: Tensor = torch.tensor([0.1, 1e-3])
    labels = torch.zeros(3_000_000, dtype=torch.int64)
    expected = 3_000_000 * weight[0].double().item()
    assert ms.targets(weight=weight)(labels) == pytest.approx(expected, rel=1e-12)
