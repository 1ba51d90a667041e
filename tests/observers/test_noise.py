"""The noise scale is tr(Sigma) / |G|^2: without bias, with an interval that holds what it says."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import midstep as ms
from midstep.observers import Microbatches, NoiseScale
from midstep.observers.estimate import NoiseEstimate, _Sums, ratio_interval, student_quantile

# A gradient of 20 entries: its mean G, and the standard deviation of each entry of one target.
MEAN = np.linspace(-0.3, 0.5, 20)
SPREAD = np.linspace(0.5, 2.0, 20)
TRUE = float((SPREAD**2).sum() / (MEAN**2).sum())
SIZES = (1, 7, 16, 2)


def window(generator: np.random.Generator) -> tuple[float, float, float, int]:
    """Sums of squares of one window whose targets have gradients of known mean and spread."""
    own = [generator.normal(MEAN, SPREAD, (n, 20)).mean(axis=0) for n in SIZES]
    total = sum(SIZES)
    whole = sum(n * g for n, g in zip(SIZES, own, strict=True)) / total
    squares = sum(n * float(g @ g) for n, g in zip(SIZES, own, strict=True))
    return squares, float(whole @ whole), total, len(SIZES)


def test_microbatches_of_unequal_size_give_an_estimate_without_bias() -> None:
    generator = np.random.default_rng(0)
    estimate = NoiseEstimate(10**9)  # all windows count alike
    for _ in range(10_000):
        assert estimate.add(*window(generator))
    fields = estimate.fields()
    assert fields["noise_scale"] == pytest.approx(TRUE, rel=0.03)
    assert fields["noise_scale_low"] < TRUE < fields["noise_scale_high"]
    assert fields["noise_scale_high"] < 1.1 * TRUE


@pytest.mark.parametrize("num_windows", [6, 60])
def test_the_interval_holds_the_truth_in_95_of_100_runs(num_windows: int) -> None:
    generator = np.random.default_rng(1)
    held = 0
    for _ in range(300):
        estimate = NoiseEstimate(30)
        for _ in range(num_windows):
            estimate.add(*window(generator))
        fields = estimate.fields()
        held += fields["noise_scale_low"] <= TRUE <= fields["noise_scale_high"]
    assert 0.92 < held / 300 <= 0.99


def test_the_scatter_of_averages_is_that_of_the_textbook() -> None:
    generator = np.random.default_rng(4)
    pairs = generator.normal(size=(40, 2)) @ np.array([[1.0, 0.5], [0.0, 2.0]])
    sums = _Sums()
    for x, y in pairs:
        sums.add(float(x), float(y), 1.0)
    wanted = np.cov(pairs.T, ddof=1) / 40
    assert sums.covariance_of_means() == pytest.approx(wanted[[0, 0, 1], [0, 1, 1]])
    assert sums.num_effective == pytest.approx(40)


def test_where_the_gradient_drowns_in_noise_the_interval_has_no_end() -> None:
    generator = np.random.default_rng(2)
    estimate = NoiseEstimate(50)
    for _ in range(50):
        own = [generator.normal(0.0, 1.0, (4, 20)).mean(axis=0) for _ in range(4)]
        whole = sum(own) / 4
        squares = sum(4 * float(g @ g) for g in own)
        estimate.add(squares, float(whole @ whole), 16, 4)
    fields = estimate.fields()
    assert fields["noise_scale_high"] == math.inf
    assert fields["noise_scale_low"] > 100.0


def test_old_windows_fade() -> None:
    estimate = NoiseEstimate(10)
    for _ in range(200):
        estimate.add(52.0, 25.0, 2, 2)
    for _ in range(200):
        estimate.add(27.0, 12.5, 2, 2)  # tr(Sigma) 2 as before, |G|^2 half
    assert estimate.fields()["noise_scale"] == pytest.approx(2.0 / 11.5, rel=1e-6)


@pytest.mark.parametrize(
    "window_of", [(4.0, 2.0, 2, 1), (math.inf, 1.0, 2, 2), (1.0, math.nan, 2, 2)]
)
def test_a_window_that_says_nothing_is_left_out(window_of: Any) -> None:
    estimate = NoiseEstimate(10)
    assert not estimate.add(*window_of)
    assert estimate.add(52.0, 25.0, 2, 2)
    assert estimate.fields() == {"noise_scale": pytest.approx(2 / 24)}


def test_the_ends_of_the_interval_are_where_the_ratio_is_just_possible() -> None:
    means, covariance, t = (6.0, 2.0), (0.5, -0.1, 0.04), 2.1
    for end in ratio_interval(means, covariance, t):
        gap = (means[0] - end * means[1]) ** 2
        variance = covariance[0] - 2 * end * covariance[1] + end**2 * covariance[2]
        assert gap == pytest.approx(t * t * variance, rel=1e-12)
    low, high = ratio_interval((6.0, 0.1), covariance, t)
    assert high == math.inf
    assert (6.0 - low * 0.1) ** 2 == pytest.approx(t * t * (0.5 + 0.2 * low + 0.04 * low**2))


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (5, 2.57058), (10, 2.22814), (120, 1.97993)],
)
def test_quantiles_are_those_of_the_tables(freedom: float, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, rel=1e-5)


class Given(torch.nn.Module):
    """A model whose gradient for a row is that row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(20, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def trained(observers: Any, num_windows: int, *, every: int = 1) -> list[ms.UpdateRecord]:
    del every
    model = Given()
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.0), observers=observers)
    generator = np.random.default_rng(3)
    records = []
    for _ in range(num_windows):
        batches = [torch.from_numpy(generator.normal(MEAN, SPREAD, (n, 20))) for n in SIZES]
        records.append(updater.update(batches, lambda m, x: m(x).sum(), count=ms.rows()))
    return records


@pytest.mark.parametrize("observers", [[NoiseScale()], [Microbatches(), NoiseScale()]], ids=len)
def test_a_run_with_gradients_of_known_covariance_finds_its_noise_scale(observers: Any) -> None:
    records = trained(observers, 300)
    extra = records[-1].extra
    assert extra["noise_scale_unit"] == "targets"
    assert extra["noise_scale_low"] < TRUE < extra["noise_scale_high"]
    assert extra["noise_scale"] == pytest.approx(TRUE, rel=0.25)
    assert "noise_scale_low" not in records[0].extra
    assert records[1].extra["noise_scale_high"] > extra["noise_scale_high"]


def test_one_microbatch_has_no_noise_scale() -> None:
    model = Given()
    updater = ms.Updater(
        model, torch.optim.SGD(model.parameters(), lr=0.0), observers=[NoiseScale()]
    )
    x = torch.ones(2, 20, dtype=torch.float64)
    record = updater.update([x], lambda m, b: m(b).sum(), count=ms.rows())
    assert record.extra == {}


def test_a_window_below_two_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`NoiseScale\(window=1\)`"):
        NoiseScale(window=1)
