"""What holds for every rule, whatever it does: one battery over all of them."""

import copy
import io
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from clipping import exact_norm, grads_of
from torch import Tensor, nn

import midstep as ms
from midstep.clip import (
    Adaptive,
    Attempt,
    ByGlobalNorm,
    ByGroupNorm,
    ByQuantile,
    ByRms,
    ByTensorAverage,
    ByTensorNorm,
    ByValue,
    ByZScore,
    Chain,
    Decision,
    Rule,
    SkipSpike,
)
from midstep.gradients import Gradients

Make = Callable[[Sequence[nn.Parameter]], Rule]

# Each with thresholds that a stream about 1 meets now and then, and memories that fill quickly.
RULES: dict[str, Make] = {
    "ByGlobalNorm": lambda _: ByGlobalNorm(1.0),
    "ByGlobalNorm p=3": lambda _: ByGlobalNorm(1.0, p=3.0),
    "ByGlobalNorm scheduled": lambda _: ByGlobalNorm(lambda step: 1.5 / (1 + step % 3)),
    "ByGroupNorm": lambda ps: ByGroupNorm([(ps[:1], 0.8)]),
    "ByTensorNorm": lambda _: ByTensorNorm(0.7),
    "ByTensorNorm p=inf": lambda _: ByTensorNorm(0.2, p=math.inf),
    "ByRms": lambda _: ByRms(0.1),
    "ByValue": lambda _: ByValue(0.15),
    "Adaptive": lambda _: Adaptive(0.4),
    "Adaptive exempt": lambda ps: Adaptive(0.4, exempt=ps[:1]),
    "ByQuantile": lambda _: ByQuantile(q=0.7, window=20, warmup=5, cap=2.0),
    "ByZScore": lambda _: ByZScore(z=1.0, beta=0.9, warmup=5, cap=2.0, patience=3),
    "ByTensorAverage": lambda _: ByTensorAverage(beta=0.9, warmup=5, cap=2.0),
    "SkipSpike": lambda _: SkipSpike(sigma=3.0, window=12),
    "Chain": lambda ps: Chain(
        SkipSpike(sigma=3.0, window=12),
        ByTensorAverage(warmup=4, cap=2.0),
        ByValue(0.3),
        Chain(ByZScore(z=1.0, warmup=5), ByGroupNorm([(ps[1:], 0.5)])),
    ),
}
REMEMBER = ["ByQuantile", "ByZScore", "ByTensorAverage", "SkipSpike", "Chain"]
EVERY = pytest.mark.parametrize("name", RULES)


class Run:
    """A stream of updates held against one rule: the same stream for the same seed."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        shapes = ((30, 4), (5,), (), (2, 3, 4))
        self.parameters = [
            nn.Parameter(torch.randn(s, generator=self.generator).to(dtype)) for s in shapes
        ]
        self.rule = RULES[name](self.parameters)
        self.step = 0

    def draw(self) -> None:
        """New gradients: log-normal in length, at times a spike, at times some missing."""
        scale = float(torch.randn((), generator=self.generator).mul(0.5).exp())
        draw = float(torch.rand((), generator=self.generator))
        scale *= 30.0 if draw > 0.9 else 1.0
        for index, parameter in enumerate(self.parameters):
            grad = torch.randn(parameter.shape, generator=self.generator) * scale / 12.0
            is_missing = index == 3 and draw < 0.3
            parameter.grad = None if is_missing else grad.to(parameter.dtype)

    def attempt(self) -> Attempt:
        return Attempt(step=self.step, loss_mean=2.0 + 0.1 * math.sin(self.step))

    def decide(self) -> Decision:
        gradients = Gradients(self.parameters)
        decision = self.rule.decide(gradients, self.attempt())
        gradients.apply_()
        return decision

    def update(self) -> tuple[Decision, list[Tensor]]:
        self.draw()
        decision = self.decide()
        if not decision.skip:
            self.rule.commit(decision)
            self.step += 1
        return decision, grads_of(self.parameters)

    def updates(self, num: int) -> Iterator[tuple[Decision, list[Tensor]]]:
        for _ in range(num):
            yield self.update()


def told(decision: Decision) -> tuple[Any, ...]:
    return decision.clipped, decision.coefficient, decision.skip, decision.threshold


def agree(first: Decision, second: Decision) -> bool:
    return all(
        a == b if a is None or b is None else a == pytest.approx(b, rel=1e-6)
        for a, b in zip(told(first), told(second), strict=True)
    )


def is_same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@EVERY
def test_the_stream_of_the_battery_fires_and_lets_pass(name: str) -> None:
    decisions = [decision for decision, _ in Run(name).updates(80)]
    fired = [d.clipped or d.skip for d in decisions]
    assert any(fired)
    assert not all(fired)


@EVERY
def test_deciding_does_not_change_the_rule(name: str) -> None:
    run = Run(name)
    for _ in run.updates(40):
        before = copy.deepcopy(run.rule.state_dict())
        run.draw()
        drawn = grads_of(run.parameters)
        with_grad = [p for p in run.parameters if p.grad is not None]
        first = run.decide()
        for parameter, grad in zip(with_grad, drawn, strict=True):
            parameter.grad = grad.clone()
        assert told(run.decide()) == told(first)
        assert run.rule.state_dict() == before


@EVERY
def test_an_update_that_is_not_applied_leaves_no_trace(name: str) -> None:
    plain, disturbed = Run(name), Run(name)
    other = torch.Generator().manual_seed(99)
    for _ in range(60):
        expected, grads = plain.update()
        for parameter in disturbed.parameters:
            parameter.grad = (torch.randn(parameter.shape, generator=other) * 50).to(
                parameter.dtype
            )
        disturbed.decide()  # and no commit
        decision, clipped = disturbed.update()
        assert told(decision) == told(expected)
        assert is_same(clipped, grads)


@EVERY
def test_no_entry_grows_or_turns(name: str) -> None:
    run = Run(name)
    for _ in range(60):
        run.draw()
        before = grads_of(run.parameters)
        norm = exact_norm(before)
        decision = run.decide()
        for old, new in zip(before, grads_of(run.parameters), strict=True):
            assert (new.abs() <= old.abs()).all()
            assert (new * old >= 0).all()
        assert exact_norm(grads_of(run.parameters)) <= norm
        if not decision.skip:
            run.rule.commit(decision)
            run.step += 1


@EVERY
def test_what_is_not_clipped_keeps_every_bit_and_a_coefficient_of_one(name: str) -> None:
    run = Run(name)
    for _ in range(60):
        run.draw()
        before = grads_of(run.parameters)
        decision = run.decide()
        if not decision.clipped:
            assert decision.coefficient == 1.0
            assert is_same(before, grads_of(run.parameters))
        else:
            assert not is_same(before, grads_of(run.parameters))
        if not decision.skip:
            run.rule.commit(decision)


@EVERY
def test_the_coefficient_is_the_norm_after_over_the_norm_before(name: str) -> None:
    run = Run(name)
    for _ in range(40):
        run.draw()
        before = exact_norm(grads_of(run.parameters), run.rule.p)
        decision = run.decide()
        if decision.coefficient is not None:
            after = exact_norm(grads_of(run.parameters), run.rule.p)
            assert decision.coefficient == pytest.approx(after / before, rel=2e-6)
        if not decision.skip:
            run.rule.commit(decision)


@EVERY
def test_a_saved_rule_goes_on_bit_for_bit(name: str) -> None:
    whole, first, second = Run(name), Run(name), Run(name)
    for _ in whole.updates(33):
        pass
    for _ in first.updates(33):
        pass
    file = io.BytesIO()
    torch.save(first.rule.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for _ in second.updates(7):  # what it remembers itself is replaced
        pass
    second.rule.load_state_dict(saved)
    assert second.rule.state_dict() == first.rule.state_dict()
    second.generator.set_state(first.generator.get_state())
    second.step = first.step
    for (expected, grads), (decision, clipped) in zip(
        whole.updates(50), second.updates(50), strict=True
    ):
        assert told(decision) == told(expected)
        assert is_same(clipped, grads)


@pytest.mark.parametrize("name", REMEMBER)
def test_a_saved_state_is_a_copy(name: str) -> None:
    run = Run(name)
    for _ in run.updates(20):
        pass
    saved = run.rule.state_dict()
    kept = copy.deepcopy(saved)
    for _ in run.updates(20):
        pass
    assert saved == kept
    other = Run(name)
    other.rule.load_state_dict(saved)
    for _ in other.updates(20):
        pass
    assert saved == kept


@pytest.mark.parametrize("name", [n for n in RULES if n not in REMEMBER])
def test_a_rule_without_a_memory_saves_nothing(name: str) -> None:
    run = Run(name)
    for _ in run.updates(3):
        pass
    assert run.rule.state_dict() == {}


@EVERY
@pytest.mark.parametrize("num_before", [0, 40])
def test_zero_gradients_stay_zero_and_are_no_trouble(name: str, num_before: int) -> None:
    run = Run(name)
    for _ in run.updates(num_before):
        pass
    for _ in range(40):
        for parameter in run.parameters:
            parameter.grad = torch.zeros_like(parameter)
        decision = run.decide()
        assert not decision.clipped
        assert not decision.skip
        run.rule.commit(decision)
    assert not any(g.any() for g in grads_of(run.parameters))


@EVERY
def test_no_gradients_and_one_tensor_alone_are_no_trouble(name: str) -> None:
    run = Run(name)
    for parameter in run.parameters:
        parameter.grad = None
    run.rule.commit(run.decide())
    for scale in (0.1, 100.0, 0.1):
        run.parameters[0].grad = torch.ones_like(run.parameters[0]) * scale
        run.rule.commit(run.decide())
    run.parameters[0].grad = torch.ones_like(run.parameters[0])
    assert told(run.decide())[2] in {True, False}


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_clipped_like_float32(name: str, dtype: torch.dtype) -> None:
    run, wide = Run(name, dtype), Run(name)
    for parameter, other in zip(wide.parameters, run.parameters, strict=True):
        parameter.data = other.detach().float()
    for _ in range(40):
        run.draw()
        for parameter, other in zip(wide.parameters, run.parameters, strict=True):
            parameter.grad = None if other.grad is None else other.grad.float()
        decision, expected = run.decide(), wide.decide()
        assert agree(decision, expected)
        narrow = [g.to(dtype) for g in grads_of(wide.parameters)]
        # A chain with an edit in it rounds twice.
        rtol, atol = max(2.0 * torch.finfo(dtype).eps, 1e-6), 2e-7
        for ours, theirs in zip(grads_of(run.parameters), narrow, strict=True):
            assert ours.dtype == dtype
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
        for each in (run, wide):
            if not decision.skip:
                each.rule.commit(decision)
                each.step += 1


@EVERY
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_huge_and_tiny_gradients_stay_finite(name: str, scale: float) -> None:
    run = Run(name)
    for _ in range(30):
        run.draw()
        for parameter in run.parameters:
            if parameter.grad is not None:
                parameter.grad *= scale
        decision = run.decide()
        assert all(g.isfinite().all() for g in grads_of(run.parameters))
        assert decision.coefficient is None or 0.0 < decision.coefficient <= 1.0
        if not decision.skip:
            run.rule.commit(decision)


@EVERY
def test_the_pending_factor_makes_no_difference(name: str) -> None:
    plain, scaled = Run(name), Run(name)
    for _ in range(40):
        expected, grads = plain.update()
        scaled.draw()
        for parameter in scaled.parameters:
            if parameter.grad is not None:
                parameter.grad *= 1024.0
        gradients = Gradients(scaled.parameters, factor=1 / 1024)
        decision = scaled.rule.decide(gradients, scaled.attempt())
        gradients.apply_()
        assert agree(decision, expected)
        for ours, theirs in zip(grads_of(scaled.parameters), grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-12)
        if not decision.skip:
            scaled.rule.commit(decision)
            scaled.step += 1


@EVERY
def test_a_copy_of_a_rule_has_a_memory_of_its_own(name: str) -> None:
    run = Run(name)
    for _ in run.updates(10):
        pass
    twin = copy.deepcopy(run.rule)
    state = copy.deepcopy(twin.state_dict())
    assert state == run.rule.state_dict()
    for _ in run.updates(10):
        pass
    assert twin.state_dict() == state


@EVERY
def test_a_gradient_that_is_not_finite_never_reaches_a_rule(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    rule = RULES[name](list(model.parameters()))
    updater = ms.Updater(
        model, torch.optim.SGD(model.parameters(), lr=0.01), clip=rule, nonfinite=ms.Skip()
    )

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return (module(batch) - batch.sum(1, keepdim=True)).square().sum()

    for index in range(20):
        batch = torch.randn(8, 3)
        if index % 5 == 4:
            batch[0, 0] = (math.nan, math.inf)[index % 2]
        state = copy.deepcopy(rule.state_dict())
        record = updater.update([batch], loss, count=ms.rows())
        if index % 5 == 4:
            assert record.verdict is ms.Verdict.SKIPPED_NONFINITE
            assert rule.state_dict() == state
        elif name in REMEMBER and record.verdict is ms.Verdict.APPLIED:
            assert rule.state_dict() != state
    assert all(p.isfinite().all() for p in model.parameters())


def test_an_update_that_one_rule_skips_leaves_no_trace_in_the_others() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    rule = Chain(SkipSpike(window=6), ByQuantile(warmup=1, cap=100.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    updater = ms.Updater(model, optimizer, clip=rule)

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return (module(torch.ones_like(batch)) * batch).sum() + batch.numel() * 2.0

    for index in range(8):
        updater.update([torch.full((4, 1), 1.0 + 0.1 * (index % 2))], loss, count=ms.rows())
    before = copy.deepcopy((rule.state_dict(), optimizer.state_dict(), model.state_dict()))
    record = updater.update([torch.full((4, 1), 50.0)], loss, count=ms.rows())
    assert record.verdict is ms.Verdict.SKIPPED_SPIKE
    after = (rule.state_dict(), optimizer.state_dict(), model.state_dict())
    assert str(before) == str(after)
    assert updater.update([torch.ones(4, 1)], loss, count=ms.rows()).verdict is ms.Verdict.APPLIED
