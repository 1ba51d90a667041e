"""Records for those who scrape: the last one as a text file in the OpenMetrics format."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from ..records import UpdateRecord

__all__ = ["OpenMetrics"]


_Sample: TypeAlias = tuple[dict[str, str], float | None]


class _Family(NamedTuple):
    """One metric, with a line for each set of labels."""

    name: str
    kind: str
    unit: str
    help: str
    samples: Sequence[_Sample]


class OpenMetrics:
    """Keep a text file at the last update, for a scraper that reads files.

    In OpenMetrics 1.0, which the text-file collector of Prometheus' node exporter reads, too. Each
    update replaces the file in one step, so that nobody ever reads half of one. Counters go on from
    the record where it counts from the beginning of the run (`midstep_updates`, `midstep_steps`);
    the others begin anew with the process, as scrapers expect.

    Args:
        path: The file, usually with the ending `.prom`; its folder is made.
        labels: Put on every line, such as `{"run": "language-1"}`.

    Raises:
        ValueError: A label has a name that the format does not take.
        OSError: The folder cannot be made.

    Example:
        >>> import tempfile
        >>> from midstep.records import Verdict
        >>> record = UpdateRecord(
        ...     update=3, step=2, verdict=Verdict.APPLIED, num_microbatches=4,
        ...     denominators={"loss": 512}, loss_means={"loss": 2.5}, loss_mean=2.5, grad_norm=2.0,
        ...     clip_coefficient=0.5, clipped=True, lr=[3e-4], loss_scale=1.0, num_nonfinite=0,
        ...     seconds=0.125)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sink = OpenMetrics(Path(folder) / "midstep.prom", labels={"run": "a"})
        ...     sink(record)
        ...     lines = sink.path.read_text().splitlines()
        >>> [line for line in lines if "grad_norm" in line]
        ['# TYPE midstep_grad_norm gauge',
         '# HELP midstep_grad_norm Norm of the gradient of the mean loss, before clipping.',
         'midstep_grad_norm{run="a"} 2.0']

    Reference: OpenMetrics 1.0, https://prometheus.io/docs/specs/om/open_metrics_spec/
    """

    def __init__(
        self, path: str | os.PathLike[str], *, labels: Mapping[str, str] | None = None
    ) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._labels = dict(labels or {})
        for name in self._labels:
            if not name.isascii() or not name.isidentifier() or name.startswith("__"):
                raise ValueError(
                    f"`OpenMetrics(labels=...)`: `{name}` is no name of a label, which is made of "
                    "letters, digits and `_` and begins with a letter. Rename it."
                )
        self._targets: dict[str, float] = {}
        self._verdicts: Counter[str] = Counter()
        self._num_microbatches = 0
        self._num_clipped = 0

    def __call__(self, record: UpdateRecord) -> None:
        """Replace the file.

        Raises:
            OSError: It cannot be written; the one from before stays.
        """
        for term, n in record.denominators.items():
            self._targets[term] = self._targets.get(term, 0) + n
        self._verdicts[str(record.verdict)] += 1
        self._num_microbatches += record.num_microbatches
        self._num_clipped += record.clipped
        families = [*self._counters(record), *_of_update(record), *_of_extra(record)]
        lines = [line for family in families for line in self._lines(family)]
        part = self.path.with_name(self.path.name + ".part")
        part.write_text("".join(f"{line}\n" for line in [*lines, "# EOF"]), encoding="utf-8")
        part.replace(self.path)

    def _counters(self, record: UpdateRecord) -> Iterator[_Family]:
        verdicts: list[_Sample] = [({"verdict": name}, n) for name, n in self._verdicts.items()]
        targets: list[_Sample] = [({"term": term}, n) for term, n in self._targets.items()]
        for name, text, samples in (
            ("updates", "Windows that ended.", _alone(record.update)),
            ("steps", "Applied updates.", _alone(record.step)),
            ("verdicts", "Updates of this process, by how they ended.", verdicts),
            ("clips", "Clipped updates of this process.", _alone(self._num_clipped)),
            ("microbatches", "Microbatches of this process.", _alone(self._num_microbatches)),
            ("targets", "What the mean losses were over, in this process.", targets),
        ):
            yield _Family(name, "counter", "", text, samples)

    def _lines(self, family: _Family) -> Iterator[str]:
        samples = [(labels, value) for labels, value in family.samples if value is not None]
        if not samples:
            return
        name = "_".join(["midstep", family.name, *([family.unit] if family.unit else [])])
        yield f"# TYPE {name} {family.kind}"
        if family.unit:
            yield f"# UNIT {name} {family.unit}"
        yield f"# HELP {name} {family.help}"
        suffix = "_total" if family.kind == "counter" else ""
        for labels, value in samples:
            yield f"{name}{suffix}{_braced({**self._labels, **labels})} {_spelt(value)}"


def _of_update(record: UpdateRecord) -> Iterator[_Family]:
    losses: list[_Sample] = [({"term": term}, mean) for term, mean in record.loss_means.items()]
    rates: list[_Sample] = [({"group": str(index)}, lr) for index, lr in enumerate(record.lr)]
    norm = "Norm of the gradient of the mean loss, before clipping."
    coefficient = "Norm after clipping over norm before."
    for name, unit, text, samples in (
        ("loss", "", "Mean loss of the last window.", losses),
        ("grad_norm", "", norm, _alone(record.grad_norm)),
        ("clip_coefficient", "ratio", coefficient, _alone(record.clip_coefficient)),
        ("learning_rate", "", "Rate of each parameter group.", rates),
        ("loss_scale", "", "What the loss is multiplied by.", _alone(record.loss_scale)),
        ("update", "seconds", "Time of the last update.", _alone(record.seconds)),
    ):
        yield _Family(name, "gauge", unit, text, samples)


_GAUGES = {
    "clip_max_norm": ("clip_max_norm", "", "Threshold of the clip rule."),
    "update_norm": ("update_norm", "", "How far the weights moved."),
    "naive_update_norm": ("naive_update_norm", "", "How far plain SGD would have moved them."),
    "grad_zeros": ("grad_zeros", "ratio", "Entries of the gradient that are zero."),
    "noise_scale": ("noise_scale", "", "Gradient noise scale."),
    "memory_bytes": ("memory_peak", "bytes", "Most memory that was held so far."),
}
_BY_TENSOR = {
    "grad_norms": ("tensor_grad_norm", "", "Norm of each gradient, before clipping."),
    "update_to_weight": ("tensor_update", "ratio", "Length of the update over that of the weight."),
    "weight_norms": ("tensor_weight_norm", "", "Norm of each weight."),
    "grad_zeros_by_tensor": ("tensor_grad_zeros", "ratio", "Entries of each gradient that are 0."),
}


def _of_extra(record: UpdateRecord) -> Iterator[_Family]:
    extra = record.extra
    for field, (name, unit, text) in _GAUGES.items():
        yield _Family(name, "gauge", unit, text, [({}, extra.get(field))])
    for field, (name, unit, text) in _BY_TENSOR.items():
        values: list[_Sample] = [
            ({"tensor": tensor}, value) for tensor, value in extra.get(field, {}).items()
        ]
        yield _Family(name, "gauge", unit, text, values)
    stages: list[_Sample] = [
        ({"stage": stage}, s) for stage, s in extra.get("stage_seconds", {}).items()
    ]
    yield _Family("stage", "gauge", "seconds", "Time of each stage of the last update.", stages)


def _alone(value: float | None) -> list[_Sample]:
    return [({}, value)]


def _braced(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _spelt(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")
    return repr(value + 0)  # a bool is 0 or 1
