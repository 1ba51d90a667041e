"""A check that fails costs nobody what the others found, nor the training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from midstep.auditing import checks, context
from midstep.auditing.history import History
from midstep.findings import Finding


def broken(history: History) -> Iterator[Finding]:
    raise ZeroDivisionError(f"{len(history.events)} events")
    yield  # a check is a generator


def audited() -> list[str]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with context.audit() as found:
        for _ in range(3):
            model(torch.ones(4, 2)).mean().backward()
            optimizer.step()
    return [finding.defect.name for finding in found.findings]


def test_a_check_that_fails_is_told_and_the_others_are_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "CHECKS", (broken, *checks.CHECKS))
    with pytest.warns(RuntimeWarning, match=r"`broken` of the audit failed \(ZeroDivisionError"):
        names = audited()
    assert names == ["zero-grad-missing"]
