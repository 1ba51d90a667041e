"""What a certificate says: as a page, as JSON, as an exit code."""

import json
import math

import midstep as ms
from midstep.verifying import Comparison, Control, Outcome, Reason, ReasonKind
from midstep.verifying.scale import named_ratio


def certificate(outcome: Outcome, *, told_apart: bool = True) -> ms.Certificate:
    good = Comparison(
        cut="halves",
        num_microbatches=2,
        gap=1e-16,
        worst=0.01,
        worst_parameter="weight",
        ratio=1.0,
        update_worst=0.02,
    )
    bad = Comparison(
        cut="ones",
        num_microbatches=8,
        gap=math.nan,
        worst=math.inf,
        worst_parameter="",
        ratio=math.nan,
        failed="ValueError: too small",
    )
    reason = Reason(kind=ReasonKind.LAYERS, what="w" * 40, why="because", remedy="do")
    return ms.Certificate(
        outcome=outcome,
        summary="so it is " * 20,
        model="Net",
        training=False,
        num_rows=8,
        num_parameters=1234,
        dtype="float64",
        gradient_norm=2.5,
        bound=1e-14,
        comparisons=(good, bad),
        controls=(Control(fault="a fault", worst=9.0 if told_apart else 0.5),),
        reasons=(reason,) if outcome is Outcome.NOT_EQUAL else (),
        notes=("a note",),
        update="AdamW",
    )


def test_the_exit_code_is_that_of_the_outcome() -> None:
    assert [certificate(outcome).exit_code for outcome in Outcome] == [0, 1, 2]
    assert [certificate(outcome).equal for outcome in Outcome] == [True, False, False]


def test_the_page_says_everything_and_fits_a_terminal() -> None:
    page = str(certificate(Outcome.NOT_EQUAL))
    for words in ("NOT EQUAL: ", "Net in evaluation mode", "1,234", "could not run", "reason 1",
                  "because", "To do: do", "a note", "update gap / bound", "AdamW"):  # fmt: skip
        assert words in page
    assert max(map(len, page.splitlines())) <= 100
    assert not any(line != line.rstrip() for line in page.splitlines())


def test_controls_that_were_missed_are_shouted() -> None:
    assert "a fault: NOT told apart (0.5 x the bound)" in str(
        certificate(Outcome.NO_CERTIFICATE, told_apart=False)
    )
    assert "a fault: told apart (9 x the bound)" in str(certificate(Outcome.EQUAL))


def test_json_is_strict_and_whole() -> None:
    found = json.loads(certificate(Outcome.NOT_EQUAL).to_json(), parse_constant=lambda _: 1 / 0)
    assert found["outcome"] == "not equal"
    assert found["comparisons"][1]["worst"] == "inf"
    assert found["comparisons"][1]["gap"] == "nan"
    assert found["reasons"][0]["kind"] == "layers"
    assert set(found) == set(ms.Certificate.__dataclass_fields__)


def test_a_control_that_is_nan_counts_as_told_apart_and_one_on_the_bound_does_not() -> None:
    assert Control(fault="", worst=math.inf).told_apart
    assert not Control(fault="", worst=1.0).told_apart


def test_a_ratio_is_spelt_with_what_it_equals() -> None:
    known = {"number of microbatches": 4.0, "count of `loss`": 96.0}
    assert named_ratio(4.00001, known) == "4.000 = number of microbatches"
    assert named_ratio(1 / 96, known) == "0.01042 = 1 / count of `loss`"
    assert named_ratio(3.9, known) == "3.900"
