"""Thresholds read off a log, against counts by hand and against the rules in a real run."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import nn

import midstep as ms
from midstep.choosing import advise_threshold, shadow, usual_rules

LOSS_RULES: list[Any] = [
    ms.ByGlobalNorm(0.5),
    ms.ByQuantile(0.7, warmup=5, cap=math.inf),
    ms.ByZScore(z=1.0, warmup=5, cap=math.inf),
    ms.SkipSpike(sigma=3.0, window=8),
    ms.Chain(ms.SkipSpike(sigma=3.0, window=8), ms.ByGlobalNorm(0.5)),
]


def norms_of(count: int = 200, *, seed: int = 0) -> list[float]:
    return np.exp(np.random.default_rng(seed).normal(0, 0.5, count)).tolist()


def test_quantiles_are_those_of_the_finite_norms_and_shares_are_counted() -> None:
    norms = norms_of()
    advice = advise_threshold([*norms, math.inf, math.nan])
    assert advice.num_norms == 200
    assert advice.num_nonfinite == 2
    for q, norm in advice.quantiles.items():
        assert norm == pytest.approx(float(np.quantile(norms, q)))
    assert advice.share_above([*norms, math.inf], 1.3) == sum(n > 1.3 for n in norms) / 200


def test_a_drifting_norm_and_spikes_are_told_and_a_steady_one_is_not() -> None:
    steady = " ".join(advise_threshold([1.0 + 0.01 * (i % 7) for i in range(100)]).words())
    assert "factor" not in steady
    assert "stand apart" not in steady
    growing = " ".join(advise_threshold([1.0 + i / 10 for i in range(100)]).words())
    assert "The norm grew by a factor of" in growing
    spiky = " ".join(advise_threshold([1.0 + 0.01 * (i % 7) for i in range(99)] + [50.0]).words())
    assert "1.00% of the norms stand apart" in spiky


@pytest.mark.parametrize("rule", LOSS_RULES, ids=lambda rule: type(rule).__name__)
def test_a_shadow_decides_as_the_rule_does_in_a_run_with_those_norms(rule: Any) -> None:
    norms = [1.0, 1.1, 0.9, 1.0, 1.2, 0.8, 1.1, 9.0, 1.0, 0.4, 1.3, 1.0, 2.5, 1.0]
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    model = nn.Module()
    model.weight = weight
    updater = ms.Updater(model, torch.optim.SGD([weight], lr=0.0), clip=rule, empty=ms.Skip())
    clipped = skipped = 0
    for norm in norms:  # a loss of w * norm has gradient norm, and is 0 at w = 0
        record = updater.update(
            [torch.tensor([norm], dtype=torch.float64)],
            lambda model, x: (model.weight * x).sum(),
            count=ms.rows(),
        )
        clipped += record.clipped
        skipped += record.verdict is ms.Verdict.SKIPPED_SPIKE
    fresh = type(rule)(*rule.rules) if isinstance(rule, ms.Chain) else rule
    fresh.load_state_dict(_empty_state_of(fresh))
    found = shadow(fresh, norms, [0.0] * len(norms))
    assert found.num_skipped == skipped
    assert found.clipped == pytest.approx(clipped / (len(norms) - skipped))


def _empty_state_of(rule: Any) -> Any:
    import copy

    state = copy.deepcopy(rule.state_dict())
    return _emptied(state)


def _emptied(value: Any) -> Any:
    if isinstance(value, dict):
        emptied = {key: _emptied(item) for key, item in value.items()}
        return emptied | ({"mean": None, "variance": 0.0} if "mean" in value else {})
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_emptied(item) for item in value]
    return [] if isinstance(value, list) else value


def test_a_shadow_of_a_rule_on_tensors_takes_the_norm_of_each() -> None:
    found = shadow(ms.ByTensorNorm(1.0), [5.0], tensor_norms=[[3.0, 4.0]])
    assert found.clipped == 1.0
    assert found.least_coefficient == pytest.approx(math.sqrt(2) / 5)


def test_a_rule_that_would_have_ended_the_run_says_when() -> None:
    norms = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, *[50.0] * 5]
    found = shadow(ms.SkipSpike(window=8, max_consecutive=2), norms, [1.0] * 13)
    assert found.num_skipped == 2
    assert found.ended == 11


def test_norms_that_are_all_0_are_refused_and_some_that_are_do_no_harm() -> None:
    with pytest.raises(ValueError, match="all 30 norms are 0"):
        advise_threshold([0.0] * 30)
    mostly = [0.0] * 25 + [1.0, 2.0, 3.0]
    for rule in usual_rules(advise_threshold(mostly), has_tensors=True):
        assert shadow(rule, mostly, [1.0] * 28, tensor_norms=[[n] for n in mostly]).clipped <= 1.0


def test_every_usual_rule_has_a_shadow_and_quantile_thresholds_clip_their_share() -> None:
    norms = norms_of(400)
    advice = advise_threshold(norms)
    shares = [
        shadow(rule, norms, [1.0] * 400).clipped for rule in usual_rules(advice, has_tensors=False)
    ]
    assert shares[:3] == pytest.approx([0.5, 0.1, 0.01], abs=0.01)
    assert len(shares) == 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("threshold")
    recipe = tiny.write(folder / "mine.py")
    assert tiny.run("train", str(recipe), "--steps", "60", "--out", str(folder / "run")) == 0
    return folder / "run"


def test_the_command_shows_shares_and_shadows(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    page = tmp_path / "norms.html"
    assert tiny.run("threshold", str(run), "--at", "0.7", "--picture", str(page)) == 0
    out = capsys.readouterr().out
    lines = (run / "updates.jsonl").read_text().splitlines()
    norms = [json.loads(line)["grad_norm"] for line in lines]
    share = sum(norm > 0.7 for norm in norms) / len(norms)
    assert f"{0.7:12.4g}{share:9.2%}   asked for" in out
    assert "SkipSpike(" in out
    text = page.read_text()
    assert '"name": "limit"' in text.replace('"name":"limit"', '"name": "limit"')
    assert 'type="range"' in text or '"input": "range"' in text.replace(
        '"input":"range"', '"input": "range"'
    )


def test_the_command_gives_json_and_refuses_what_it_cannot_read(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert tiny.run("threshold", str(run), "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["num_norms"] == 60
    assert len(values["shadows"]) >= 8
    assert tiny.run("threshold", str(run), "--at", "0") == 2
    assert "greater than 0" in tiny.one_line(capsys)
    assert tiny.run("threshold", str(tmp_path / "none")) == 2
    tiny.one_line(capsys)
    assert tiny.run("batch", str(run)) == 2
    assert "--observe" in tiny.one_line(capsys)
