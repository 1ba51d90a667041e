"""The summary: numbers of applied updates, skipped ones apart, against a plain loop of torch."""

import copy
import math

import pytest
import torch
from torch import nn

import midstep as ms
from midstep.recipes.held_out import HeldOut
from midstep.recipes.summary import Summary


def record(update: int, **given: object) -> ms.UpdateRecord:
    fields: dict[str, object] = {
        "update": update,
        "step": update,
        "verdict": ms.Verdict.APPLIED,
        "num_microbatches": 4,
        "denominators": {"loss": 100},
        "loss_means": {"loss": 2.0},
        "loss_mean": 2.0,
        "grad_norm": 0.5,
        "clip_coefficient": 1.0,
        "clipped": False,
        "lr": [0.1],
        "loss_scale": 1.0,
        "num_nonfinite": 0,
        "seconds": 0.5,
    }
    return ms.UpdateRecord(**{**fields, **given})  # type: ignore[arg-type]


def skipped(update: int, verdict: ms.Verdict, **given: object) -> ms.UpdateRecord:
    return record(update, verdict=verdict, clip_coefficient=None, **given)


def test_the_figures_of_a_clipped_run_are_those_of_a_plain_loop() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    plain = copy.deepcopy(model).double()
    batches = [(torch.randn(8, 10), torch.randn(8, 1) * 0.7) for _ in range(32)]
    updater = ms.Updater(
        model, torch.optim.Adam(model.parameters(), lr=0.001), clip=ms.ByGlobalNorm(1.0)
    )
    records = [
        updater.update(window, lambda m, b: (m(b[0]) - b[1]).square().sum())
        for window in updater.windows(batches, size=4, count=ms.elements())
    ]
    optimizer, norms = torch.optim.Adam(plain.parameters(), lr=0.001), []
    for start in range(0, 32, 4):
        optimizer.zero_grad()
        x, y = (torch.cat(p).double() for p in zip(*batches[start : start + 4], strict=True))
        nn.functional.mse_loss(plain(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item())
        optimizer.step()
    summary = Summary.of(records)
    assert (summary.num_applied, summary.num_microbatches) == (8, 32)
    assert summary.mean_norm == pytest.approx(sum(norms) / 8, rel=1e-4)
    assert summary.largest_norm == pytest.approx(max(norms), rel=1e-4)
    assert summary.clipped_share == sum(norm > 1 for norm in norms) / 8
    assert 0 < sum(norm > 1 for norm in norms) < 8, "the set-up must show both"
    text = "\n".join(summary.lines())
    assert "8 applied, 0 skipped, from 32 microbatches" in text
    assert f"mean {sum(norms) / 8:.4g}, largest {max(norms):.4g}" in text


def test_norms_and_the_share_clipped_are_those_of_applied_updates() -> None:
    summary = Summary.of(
        [
            record(1, grad_norm=4.0, clipped=True),
            record(2, grad_norm=1.0),
            skipped(3, ms.Verdict.SKIPPED_NONFINITE, grad_norm=math.inf),
            skipped(4, ms.Verdict.SKIPPED_SPIKE, grad_norm=900.0),
            skipped(5, ms.Verdict.SKIPPED_EMPTY, grad_norm=None, denominators={"loss": 0}),
        ]
    )
    assert (summary.mean_norm, summary.largest_norm) == (2.5, 4.0)
    assert summary.clipped_share == 0.5
    assert summary.num_skipped == {"skipped_nonfinite": 1, "skipped_spike": 1, "skipped_empty": 1}
    assert summary.targets == {"loss": 400}
    text = "\n".join(summary.lines())
    assert "2 applied, 3 skipped (1 empty, 1 nonfinite, 1 spike)" in text
    assert "50.0% of applied updates" in text
    assert "400 in 2.5 s of updates (160 a second)" in text


def test_a_run_without_an_applied_update_has_no_norm() -> None:
    summary = Summary.of([skipped(1, ms.Verdict.SKIPPED_NONFINITE, grad_norm=math.nan)])
    assert summary.mean_norm is summary.largest_norm is summary.clipped_share is None
    assert any("nothing was applied" in line for line in summary.lines())
    assert Summary.of([]).lines()


def test_terms_are_counted_each_on_its_own() -> None:
    summary = Summary.of([record(1, denominators={"lm": 10, "aux": 2})] * 2)
    assert summary.targets == {"lm": 20, "aux": 4}
    assert "20 lm, 4 aux" in "\n".join(summary.lines())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (2.0, "2.0000 after 9 updates, 1.0000 below the baseline of guessing, 3.0000"),
        (3.5, "3.5000 after 9 updates, 0.5000 above the baseline of guessing, 3.0000"),
        (math.nan, "nan after 9 updates, not below the baseline of guessing, 3.0000"),
    ],
)
def test_the_held_out_loss_stands_beside_its_baselines(loss: float, words: str) -> None:
    held_out = HeldOut(
        step=9, update=9, loss_mean=loss, loss_means={"loss": loss}, denominators={"loss": 1},
        seconds=0.0,
    )  # fmt: skip
    summary = Summary.of([record(1)], held_out=held_out, baselines={"guessing": 3.0})
    assert words in "\n".join(summary.lines())


def test_what_a_recipe_says_a_reader_must_know_ends_the_summary() -> None:
    lines = Summary.of([], notes=["it crosses rows", "and more"]).lines()
    assert [line.split(maxsplit=1) for line in lines[-2:]] == [
        ["note", "it crosses rows"],
        ["note", "and more"],
    ]
