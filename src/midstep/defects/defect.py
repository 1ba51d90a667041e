"""What a defect is: one entry serves the linter, the auditor, the pages and `midstep explain`."""

from __future__ import annotations

import dataclasses
import enum
import re

__all__ = ["SETUP", "Defect", "Level", "Tool"]

# The code of every entry runs after these lines: a loader of ten batches, and what trains on it.
SETUP = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]
"""

CODE = re.compile(r"MS[1-8]\d\d")
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class Level(enum.StrEnum):
    """How sure a tool is that the training is not what was meant."""

    ERROR = "error"  # it is not, and this is shown
    WARNING = "warning"  # it likely is not
    ADVICE = "advice"  # it costs time or memory, or it depends on what could not be seen


class Tool(enum.StrEnum):
    """What can find a defect."""

    LINT = "lint"  # from the text alone
    AUDIT = "audit"  # while the script runs
    VERIFY = "verify"  # by an experiment with the model, a batch and the loss


@dataclasses.dataclass(frozen=True, slots=True)
class Defect:
    """One way in which a training loop goes wrong.

    Args:
        code: `MS` and three digits; the first is the group. Never given to another defect.
        name: The same in words, joined by hyphens. It names the defect, not the remedy.
        title: One sentence: what the loop does.
        level: How sure a tool usually is. A finding may say otherwise.
        why: How it comes about and why it is easily missed.
        effect: What it does to the training.
        fix: What to write instead.
        bad: A loop that has it, on the line marked with the code. It runs after `SETUP`.
        good: The same loop without it.
        tools: Which of the tools can find it.
        stops_with: The exception that torch raises when `bad` runs, or empty.

    Example:
        >>> from midstep.defects import find
        >>> find("MS104").name, find("tail-wrong-divisor").code
        ('tail-wrong-divisor', 'MS104')
    """

    code: str
    name: str
    title: str
    level: Level
    why: str
    effect: str
    fix: str
    bad: str
    good: str
    tools: tuple[Tool, ...]
    stops_with: str = ""

    def __post_init__(self) -> None:
        assert CODE.fullmatch(self.code), self.code
        assert NAME.fullmatch(self.name), self.name
