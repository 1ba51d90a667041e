"""A mended loop is run: it has the defect no more, and does what the good loop does."""

import warnings
from typing import Any

import pytest
import torch

from midstep.defects import SETUP, find
from midstep.lint import Source, lint
from midstep.lint.fixes import fixed

FIXED = ("MS202", "MS207", "MS602", "MS705", "MS803")


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(code, names)
    return names


def weights(names: dict[str, Any]) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in names["model"].parameters()])


@pytest.mark.parametrize("code", FIXED)
def test_a_mended_loop_trains_as_the_good_one_does(code: str) -> None:
    defect = find(code)
    text, number = fixed(Source("bad.py", SETUP + defect.bad))
    assert number == 1
    assert lint(Source("mended.py", text)).edits == {}
    assert torch.equal(weights(run(text)), weights(run(SETUP + defect.good)))


@pytest.mark.parametrize("code", ["MS202", "MS207", "MS705"])
def test_the_loop_before_it_was_mended_trains_otherwise(code: str) -> None:
    # Else the test above could not fail.
    defect = find(code)
    clip = defect.bad.replace("1.0)", "0.1)"), defect.good.replace("1.0)", "0.1)")
    bad, good = (weights(run(SETUP + text)) for text in clip)
    assert not torch.equal(bad, good)


def test_a_total_that_was_mended_keeps_no_graph() -> None:
    bad = SETUP + find("MS803").bad
    text, _ = fixed(Source("bad.py", bad))
    assert run(bad)["total"].requires_grad
    assert not run(text)["total"].requires_grad


def test_a_clip_that_was_mended_raises_for_a_norm_that_is_not_finite() -> None:
    bad = SETUP + 'loader[3][0][0, 0] = float("inf")\n' + find("MS602").bad
    text, _ = fixed(Source("bad.py", bad))
    assert not weights(run(bad)).isfinite().all()
    assert weights(run(text)).isfinite().all()


def test_a_scaler_that_is_not_in_sight_of_the_clip_is_not_written_there() -> None:
    text = SETUP + (
        'scaler = torch.amp.GradScaler("cpu")\n\n\n'
        "def clip(module):\n"
        "    nn.utils.clip_grad_norm_(module.parameters(), 1.0)\n\n\n"
        "def train(scaler):\n"
        "    for x, y in loader:\n"
        "        optimizer.zero_grad()\n"
        "        scaler.scale(F.cross_entropy(model(x), y)).backward()\n"
        "        clip(model)\n"
        "        scaler.step(optimizer)\n"
        "        scaler.update()\n\n\n"
        "train(scaler)\n"
    )
    assert [finding.defect.code for finding in lint(Source("a.py", text)).findings][:1] == ["MS802"]
    assert "MS202" in {finding.defect.code for finding in lint(Source("a.py", text)).findings}
    assert fixed(Source("a.py", text)) == (text, 0)


def test_text_that_is_not_ascii_is_changed_at_the_right_place() -> None:
    line = 'name = "é"; total += loss\n'
    text = (
        "for x, y in loader:\n"
        "    optimizer.zero_grad()\n"
        "    loss = criterion(model(x), y)\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        f"    {line}"
    )
    new, number = fixed(Source("a.py", text))
    assert number == 1
    assert new == text.replace("+= loss", "+= loss.detach()")


def test_what_has_no_safe_change_is_left_alone() -> None:
    text = SETUP + find("MS109").bad
    assert fixed(Source("a.py", text)) == (text, 0)


def test_comments_in_what_is_wrapped_stay() -> None:
    made = "params = filter(  # what trains\n    lambda p: p.requires_grad, model.parameters()\n)"
    bad = find("MS207").bad.replace(
        "params = filter(lambda p: p.requires_grad, model.parameters())", made
    )
    assert made in bad
    text, number = fixed(Source("a.py", SETUP + bad))
    assert number == 1
    assert made.replace("filter(", "list(filter(", 1) + ")" in text


def test_a_comment_that_would_be_lost_keeps_a_call_as_it_is() -> None:
    call = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    bad = SETUP + find("MS602").bad.replace(call, call.replace("1.0", "1.0  # by hand\n        "))
    assert fixed(Source("a.py", bad)) == (bad, 0)


def test_a_new_line_ends_as_its_neighbours_do() -> None:
    windows = (SETUP + find("MS202").bad).replace("\n", "\r\n")
    text, number = fixed(Source("a.py", windows))
    assert number == 1
    assert text.count("\n") == text.count("\r\n") == windows.count("\n") + 1


def test_a_form_feed_ends_no_line() -> None:
    text, number = fixed(Source("a.py", SETUP + "\x0c\n" + find("MS202").bad))
    assert number == 1
    assert "    scaler.unscale_(optimizer)\n    nn.utils.clip_grad_norm_" in text
