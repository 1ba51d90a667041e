"""The page opens offline, draws, zooms and tells; looked at in a headless Chromium."""

import http.client
import json
import math
import re
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import browser
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_records import record_of

from midstep.report import Run, read
from midstep.report.page import serving, write_page, write_pictures
from midstep.report.page.thinning import kept_rows

needs_browser = pytest.mark.skipif(browser.PATH is None, reason="there is no Chromium here")


def line(update: int, **extra: object) -> str:
    """A record of a run whose norm, loss and rate are closed forms of the update."""
    is_bad = update % 40 == 0
    record = record_of(
        update=update,
        step=update - update // 40,
        verdict="skipped_nonfinite" if is_bad else "applied",
        loss_mean=math.nan if is_bad else 1 + 2 / update,
        grad_norm=math.nan if is_bad else 0.5 + (update * 7919 % 100) / 100,
        clip_coefficient=None if is_bad else min(1.0, 1 / (0.5 + (update * 7919 % 100) / 100)),
        clipped=not is_bad and update * 7919 % 100 > 50,
        lr=[1e-3 / (1 + update / 1000)],
        extra=extra,
    )
    return record.to_json() + "\n"


def observed(update: int) -> dict[str, object]:
    return {
        "grad_norms": {"first.weight": 0.1 + update % 3, "second.weight": 0.2},
        "update_to_weight": {"first.weight": 1e-3, "second.weight": 1e-4},
        "update_norm": 0.01,
        "naive_update_norm": 0.002,
        "noise_scale": 100.0 + update,
        "noise_scale_low": 50.0,
        "noise_scale_high": 400.0,
        "memory_bytes": 10**9,
        "stage_seconds": {"data": 0.01, "forward": 0.03, "backward": 0.06, "step": 0.01},
        "loss_scale": 1024.0,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a run")
    lines = [line(update, **observed(update)) for update in range(1, 241)]
    (folder / "updates.jsonl").write_text("".join(lines))
    held_out = [{"update": update, "loss_mean": 1.5} for update in (60, 120, 240)]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    path = folder / "report.html"
    write_page([read(folder)], path)
    return path


@pytest.fixture(scope="module")
def one_chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def chromium(one_chromium: browser.Browser) -> browser.Browser:
    """As new: no page, nothing said, a wide window in the light."""
    one_chromium.send("Page.navigate", url="about:blank")
    one_chromium.resize(1400, 900)
    one_chromium.prefer("light")
    one_chromium.messages.clear()
    one_chromium.requests.clear()
    return one_chromium


# -- without a browser ----------------------------------------------------------------------------


def test_the_page_refers_to_nothing_outside_itself(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert re.findall(r"(?:src|href|url)\s*[=(](?!\s*[\"']?data:)", markup) == []
    assert "default-src 'none'" in markup


def test_the_verdict_and_the_figures_stand_in_the_page_as_text(page: Path) -> None:
    markup = re.sub(r"<script.*?</script>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert "in 240 updates" in markup
    assert "234 applied" in markup
    for name in ("Loss", "Gradient norm before clipping", "Time by stage", "Gradient noise scale"):
        assert f">{name}</h2>" in markup
    charts = re.findall(r'<div class="chart".*?>', markup, flags=re.DOTALL)
    assert len(charts) == 15
    assert all('role="img"' in chart and 'aria-label="' in chart for chart in charts)
    assert markup.count("<th scope") > 20


def test_a_name_of_a_run_is_text_and_never_markup(folder: Path, tmp_path: Path) -> None:
    run = read(folder, name="</script><script>alert(1)</script>")
    write_page([run], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script>alert(1)" not in text


def long_run(tmp_path: Path, length: int) -> Run:
    with (tmp_path / "updates.jsonl").open("w") as file:
        for update in range(1, length + 1):
            file.write(line(update) if update != 54_321 else line(54_321).replace("0.5", "0.5"))
    return read(tmp_path)


COLUMNS = st.lists(
    st.lists(
        st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf), min_size=50, max_size=50
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=40)
@given(columns=COLUMNS, must=st.sets(st.integers(0, 49)), budget=st.integers(1, 60))
def test_thinning_never_drops_an_extreme_an_end_or_what_must_be_kept(
    columns: list[list[float]], must: set[int], budget: int
) -> None:
    arrays = [np.array(column) for column in columns]
    flags = np.array([row in must for row in range(50)])
    rows = set(kept_rows(arrays, flags, budget).tolist())
    assert must | {0, 49} <= rows
    for array in arrays:
        finite = np.flatnonzero(np.isfinite(array))
        assert set(np.flatnonzero(np.isinf(array))) <= rows
        if len(finite):
            kept = [array[row] for row in rows if np.isfinite(array[row])]
            assert min(kept) == array[finite].min()
            assert max(kept) == array[finite].max()


def test_the_pictures_are_the_panels_of_the_page(tmp_path: Path) -> None:
    lines = [line(update, update_to_weight={"a.weight": 1e-3}) for update in range(1, 30)]
    (tmp_path / "updates.jsonl").write_text("".join(lines))
    written = write_pictures([read(tmp_path)], tmp_path / "pictures")
    names = {path.stem for path in written}
    assert names == {
        *("report", "verdicts", "loss", "norm", "clipped", "coefficient", "rate", "targets"),
        *("time", "speed", "ratios"),
    }
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert path.stat().st_size > 3000  # an empty picture has less


# -- in a browser ---------------------------------------------------------------------------------


def domains(chromium: browser.Browser) -> dict[str, list[float]]:
    found: dict[str, list[float]] = chromium.ask(
        "Object.fromEntries([...report.charts].map(([id, c]) => [id, c.view.scale('x').domain()]))"
    )
    return found


def box(chromium: browser.Browser, panel: str) -> dict[str, float]:
    """Where the frame of a chart is in the window, after it was scrolled into sight."""
    found: dict[str, float] = chromium.ask(
        f"""(() => {{
            const c = report.charts.get("{panel}");
            c.place.scrollIntoView({{block: "center"}});
            const r = c.place.getBoundingClientRect(), o = c.view.origin();
            return {{x: r.left + o[0], y: r.top + o[1], w: c.view.width(), h: c.view.height()}};
        }})()"""
    )
    return found


INK = """
[...document.querySelectorAll(".chart canvas")].map(canvas => {
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let ink = 0;
  for (let i = 3; i < data.length; i += 4) ink += data[i] > 0;
  return ink / (data.length / 4);
})
"""


@needs_browser
def test_every_panel_draws_and_the_console_stays_silent(
    chromium: browser.Browser, page: Path
) -> None:
    chromium.open(page.as_uri())
    shares = chromium.ask(INK)
    assert len(shares) == len(domains(chromium)) == 15
    assert min(shares) > 0.005
    assert chromium.messages == []
    assert [address for address in chromium.requests if address.startswith("file:")] == [
        page.as_uri()
    ]
    assert not any(address.startswith("http") for address in chromium.requests)


@needs_browser
def test_a_brush_on_one_chart_zooms_them_all_and_a_button_goes_back(
    chromium: browser.Browser, page: Path
) -> None:
    chromium.open(page.as_uri())
    at = box(chromium, "loss")
    y = at["y"] + at["h"] / 2
    chromium.drag(at["x"] + at["w"] * 0.25, at["x"] + at["w"] * 0.5, y)
    chromium.wait("report.shown.lo > 1")
    chromium.wait("[...report.charts.values()].every(c => c.view.scale('x').domain()[0] > 1)")
    lo, hi = domains(chromium)["norm"]
    assert 55 <= lo <= 67
    assert 113 <= hi <= 127
    assert all(domain == [lo, hi] for domain in domains(chromium).values())
    assert chromium.ask("document.getElementById('from').value") == str(int(lo))
    assert chromium.ask("location.hash") == f"#{int(lo)}-{int(hi)}"
    chromium.ask("document.getElementById('whole').click()")
    chromium.wait("[...report.charts.values()].every(c => c.view.scale('x').domain()[1] === 240)")
    assert chromium.messages == []


@needs_browser
def test_pointing_at_an_update_shows_its_record(chromium: browser.Browser, page: Path) -> None:
    chromium.open(page.as_uri())
    at = box(chromium, "norm")
    chromium.hover(at["x"] + at["w"] * (101 - 1) / 239, at["y"] + at["h"] / 2)
    text = chromium.wait("!document.getElementById('record').hidden && record.innerText")
    assert "update 101" in text
    norm = 0.5 + (101 * 7919 % 100) / 100
    assert re.search(rf"norm before clipping\s+{norm:.5g}", text)
    assert "applied" in text
    cursors = chromium.ask(
        "[...document.querySelectorAll('.cursor')].filter(c => !c.hidden).length"
    )
    assert cursors == 15


@needs_browser
def test_the_keyboard_walks_and_zooms_and_a_skipped_update_says_why(
    chromium: browser.Browser, page: Path
) -> None:
    chromium.open(page.as_uri())
    chromium.ask("document.querySelector('[data-panel=norm]').focus()")
    chromium.press("ArrowRight")  # from the middle, 121
    assert "update 122" in chromium.ask("document.getElementById('record').innerText")
    for _ in range(2):
        chromium.press("ArrowLeft")
    text = chromium.ask("document.getElementById('record').innerText")
    assert "update 120" in text
    assert "skipped, nonfinite" in text
    chromium.press("+")
    chromium.wait("report.shown.hi - report.shown.lo < 130")
    chromium.press("0")
    chromium.wait("report.shown.hi === 240")


@needs_browser
def test_nothing_is_wider_than_the_window(chromium: browser.Browser, page: Path) -> None:
    for width in (1400, 820, 390):
        chromium.resize(width, 844, is_phone=width < 500)
        chromium.open(page.as_uri())
        assert chromium.ask("document.documentElement.scrollWidth") == width
        over = chromium.ask(
            "[...document.querySelectorAll('.chart canvas')].filter(c => "
            "c.getBoundingClientRect().right > innerWidth).length"
        )
        assert over == 0


@needs_browser
def test_light_and_dark_follow_the_system_and_the_button(
    chromium: browser.Browser, page: Path
) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    seen = []
    for colours in ("light", "dark"):
        chromium.prefer(colours)
        chromium.open(page.as_uri())
        seen.append(chromium.ask(paper))
    assert seen[0] == "rgb(245, 246, 248)"
    assert seen[1] == "rgb(16, 20, 27)"
    chromium.ask("document.getElementById('theme').click()")
    chromium.wait(f"{paper} === '{seen[0]}'")
    chromium.ask("localStorage.clear()")
    assert chromium.messages == []


@needs_browser
def test_a_hundred_thousand_updates_open_in_three_seconds_from_five_megabytes(
    chromium: browser.Browser, tmp_path: Path
) -> None:
    run = long_run(tmp_path, 100_000)
    path = tmp_path / "report.html"
    write_page([run], path)
    assert path.stat().st_size < 5e6
    seconds = min(chromium.open(path.as_uri()) for _ in range(2))
    assert seconds < 3
    assert chromium.messages == []
    assert "Of the 100,000 updates" in chromium.ask("document.querySelector('footer').innerText")
    skipped = chromium.ask("report.data.runs[0].verdicts.filter(v => v !== 'applied').length")
    assert skipped == 2500
    strip = "report.data.panels[0].tables.ticks.g.filter(g => g !== 'applied').length"
    assert chromium.ask(strip) == 2500
    for column, best in (("grad_norm", np.nanmax), ("grad_norm", np.nanmin)):
        kept = chromium.ask(f"report.data.runs[0].columns.{column}.filter(v => v !== null)")
        assert best(kept) == pytest.approx(best(run.column(column)))


@needs_browser
def test_several_runs_lie_over_each_other_in_colours_of_their_own(
    chromium: browser.Browser, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    write_page([read(folder, name="one"), read(folder, name="two")], path)
    chromium.open(path.as_uri())
    groups = chromium.ask(
        "[...new Set(report.charts.get('loss').view.data('lines').map(r => r.g))]"
    )
    assert groups == ["one", "two"]
    assert chromium.messages == []


# -- while it goes on -----------------------------------------------------------------------------


@needs_browser
def test_a_run_that_goes_on_is_followed_without_losing_the_zoom(
    chromium: browser.Browser, tmp_path: Path
) -> None:
    log = tmp_path / "run" / "updates.jsonl"
    log.parent.mkdir()
    log.write_text("".join(line(update) for update in range(1, 101)))
    process = subprocess.Popen(
        [sys.executable, "-m", "midstep", "report", "--watch", str(log.parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        assert address.startswith("http://127.0.0.1:")
        chromium.open(address)
        chromium.ask("report.zoom(20, 60)")
        chromium.ask("document.querySelector('#panel-norm details').open = true")
        chromium.wait("location.hash === '#20-60'")
        with log.open("a") as file:
            file.write("".join(line(update) for update in range(101, 151)))
        chromium.wait("document.documentElement.dataset.updates === '150'")
        assert domains(chromium)["norm"] == [20, 60]
        chromium.ask("document.getElementById('whole').click()")
        chromium.wait("report.charts.get('norm').view.scale('x').domain()[1] === 150")
        with log.open("a") as file:  # the whole run stays the whole run
            file.write(line(151))
        chromium.wait("report.charts.get('norm').view.scale('x').domain()[1] === 151")
        assert chromium.ask("document.querySelector('#panel-norm details').open")
        assert "to 151" in chromium.ask("document.querySelector('#panel-norm table').textContent")
        assert chromium.messages == []
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 0
        assert err == ""
    finally:
        process.kill()
        process.wait()


def test_the_server_answers_this_machine_by_its_own_name_only(folder: Path) -> None:
    with serving(lambda: [read(folder)], lambda: "now") as address:
        place = urllib.parse.urlsplit(address)
        assert place.hostname == "127.0.0.1"

        def ask(path: str, host: str) -> tuple[int, bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=60)
            connection.request("GET", path, headers={"Host": host})
            answer = connection.getresponse()
            found = answer.status, answer.read()
            connection.close()
            return found

        assert ask("/data?key=now", place.netloc) == (204, b"")
        status, body = ask("/data?key=before", place.netloc)
        assert status == 200
        assert json.loads(body)["key"] == "now"
        assert ask("/data?key=before", f"elsewhere.example:{place.port}") == (403, b"")
        assert ask("/../updates.jsonl", place.netloc)[0] == 404


def test_watching_waits_for_the_first_update_and_ends_when_asked(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"format": "midstep run"}')
    process = subprocess.Popen(
        [sys.executable, "-m", "midstep", "report", "--watch", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "waiting for the first update" in process.stdout.readline()
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (0, "")
    finally:
        process.kill()
        process.wait()


def test_the_command_writes_the_page_beside_the_run_here_or_where_it_is_told(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "out" / "page.html"
    assert tiny.run("report", folder, "--out", path) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split(maxsplit=1) == ["page", str(path)]
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    monkeypatch.chdir(tmp_path)
    for runs, place in (((folder,), folder), ((folder, folder), tmp_path)):
        assert tiny.run("report", *runs) == 0
        assert (place / "report.html").is_file()
