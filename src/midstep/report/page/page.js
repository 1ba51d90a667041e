// What somebody does with the page: point, drag, press a key, choose a range or colours.

const state = {cursor: null, from: null};
const FIELDS = {
  step: "step", loss_mean: "loss", grad_norm: "norm before clipping", threshold: "threshold",
  coefficient: "clip coefficient", lr: "rate", loss_scale: "loss scale", targets: "targets",
  num_microbatches: "microbatches", num_nonfinite: "non-finite entries", seconds: "seconds",
  targets_per_second: "targets/s", update_norm: "size of the update",
  naive_update_norm: "rate x norm", noise_scale: "noise scale", grad_largest: "largest entry",
  grad_zeros: "share of zeros", outlier_microbatch: "outlier microbatch",
  stage_data: "seconds of data", stage_forward: "of forward", stage_backward: "of backward",
  stage_measure: "of measuring", stage_step: "of the step", microbatch_spread: "outlier, of the median", memory_bytes: "memory, bytes",
};
const HIDDEN = new Set(["update", "clipped"]);

function spelt(value) {
  if (value === null || value === undefined) return "-";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e6 ? String(Number(value.toPrecision(5))) : value.toExponential(2);
}

function recordOf(run, index, row) {
  const dl = [];
  const add = (name, value) => dl.push(`<dt>${name}</dt><dd>${value}</dd>`);
  add("ended", run.verdicts[row].replace("_", ", ") + (run.columns.clipped && run.columns.clipped[row] ? ", clipped" : ""));
  for (const [name, values] of Object.entries(run.columns)) {
    if (HIDDEN.has(name) || name.endsWith("_smooth") || values[row] === null) continue;
    if (name === "num_nonfinite" && !values[row]) continue;
    if (name === "loss_scale" && values[row] === 1) continue;
    const group = /^lr\.(\d+)$/.exec(name);
    add(FIELDS[name] || (group && `rate of group ${+group[1] + 1}`) || name.replace(/[_.]/g, " ").replace(/[<>&]/g, ""), spelt(values[row]));
  }
  const title = document.createElement("span");
  title.textContent = `${DATA.runs.length > 1 ? `${run.name}, ` : ""}update ${spelt(run.columns.update[row])}`;
  const key = DATA.runs.length > 1 ? `<i class="key" style="--c:var(--c${index % 6})"></i>` : "";
  const size = dl.length > 12 ? ' class="long"' : "";
  return `<h4>${key}${title.outerHTML}</h4><dl${size}>${dl.join("")}</dl>`;
}

function point(u, x, y) {
  state.cursor = u;
  const box = $("record");
  const inReach = DATA.runs.map((run, index) => [run, index])
    .filter(([run]) => u >= run.first - 0.5 && u <= run.last + 0.5);
  const records = (inReach.length ? inReach : [[DATA.runs[0], 0]]).slice(0, 4).map(([run, index]) => {
    const row = nearestRow(run.columns.update, u);
    if (index === 0 || state.cursor === u) state.cursor = run.columns.update[row];
    return recordOf(run, index, row);
  });
  box.innerHTML = records.join("");
  box.hidden = false;
  const {width, height} = box.getBoundingClientRect();
  const left = x + 18 + width < innerWidth ? x + 18 : Math.max(8, x - width - 18);
  const top = Math.min(Math.max(8, y - height / 3), Math.max(8, innerHeight - height - 8));
  box.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  placeCursors();
}

function leave() {
  state.cursor = null;
  $("record").hidden = true;
  placeCursors();
}

function overlay(chart, kind) {
  let node = chart.place.querySelector(`:scope > .${kind}`);
  if (!node) {
    node = document.createElement("span");
    node.className = kind;
    chart.place.append(node);
  }
  return node;
}

function placeCursors() {
  for (const chart of charts.values()) {
    const node = overlay(chart, "cursor"), frame = frameOf(chart);
    const isShown = state.cursor !== null && state.cursor >= shown.lo && state.cursor <= shown.hi;
    node.hidden = !isShown;
    if (isShown) {
      node.style.cssText = `left:${pixelOf(chart, state.cursor)}px;top:${frame.top}px;height:${frame.height}px`;
    }
  }
}

function placeBrushes(from, to) {
  for (const chart of charts.values()) {
    const node = overlay(chart, "brush"), frame = frameOf(chart);
    node.hidden = from === null;
    if (from === null) continue;
    const ends = [pixelOf(chart, Math.min(from, to)), pixelOf(chart, Math.max(from, to))];
    node.style.cssText = `left:${ends[0]}px;width:${ends[1] - ends[0]}px;top:${frame.top}px;height:${frame.height}px`;
  }
}

function within(chart, event) {
  const frame = frameOf(chart), box = chart.place.getBoundingClientRect();
  const pixel = Math.min(Math.max(event.clientX - box.left, frame.left), frame.left + frame.width);
  return updateAt(chart, pixel);
}

function listen(place) {
  const chart = () => charts.get(place.dataset.panel);
  place.addEventListener("pointerdown", event => {
    if (!chart() || event.button !== 0) return;
    state.from = within(chart(), event);
    if (event.pointerType !== "touch") place.setPointerCapture(event.pointerId);
  });
  place.addEventListener("pointermove", event => {
    if (!chart()) return;
    const u = within(chart(), event);
    if (state.from !== null) placeBrushes(state.from, u);
    point(u, event.clientX, event.clientY);
  });
  const end = event => {
    if (state.from === null || !chart()) return;
    const ends = [state.from, within(chart(), event)].sort((a, b) => a - b);
    const pixels = Math.abs(pixelOf(chart(), ends[1]) - pixelOf(chart(), ends[0]));
    state.from = null;
    placeBrushes(null);
    if (pixels > 6) zoom(ends[0], ends[1]);
  };
  place.addEventListener("pointerup", end);
  place.addEventListener("pointercancel", () => { state.from = null; placeBrushes(null); leave(); });
  place.addEventListener("pointerleave", () => { if (state.from === null) leave(); });
  place.addEventListener("dblclick", () => zoom(DATA.lo, DATA.hi));
  place.addEventListener("blur", leave);
  place.addEventListener("keydown", event => {
    if (!chart()) return;
    const span = shown.hi - shown.lo, updates = DATA.runs[0].columns.update;
    const at = state.cursor === null ? (shown.lo + shown.hi) / 2 : state.cursor;
    const walk = rows => {
      const row = Math.min(Math.max(nearestRow(updates, at) + rows, 0), updates.length - 1);
      const box = place.getBoundingClientRect();
      point(updates[row], box.left + pixelOf(chart(), updates[row]), box.top + 30);
    };
    const keys = {
      ArrowLeft: () => walk(event.shiftKey ? -10 : -1), ArrowRight: () => walk(event.shiftKey ? 10 : 1),
      "+": () => zoom(at - span / 4, at + span / 4), "=": () => zoom(at - span / 4, at + span / 4),
      "-": () => zoom(at - span, at + span), "0": () => zoom(DATA.lo, DATA.hi), Escape: leave,
    };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
}

function chosen(id, otherwise) {
  const value = Number($(id).value.replace(/[^0-9.]/g, ""));
  return Number.isFinite(value) && $(id).value ? value : otherwise;
}

function listenToButtons() {
  $("whole").addEventListener("click", () => zoom(DATA.lo, DATA.hi));
  document.querySelector(".range").addEventListener("submit", event => event.preventDefault());
  for (const id of ["from", "to"]) {
    $(id).addEventListener("change", () => zoom(chosen("from", DATA.lo), chosen("to", DATA.hi)));
  }
  $("theme").addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("midstep-theme", theme); } catch { /* a file may have no storage */ }
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  document.addEventListener("click", event => {
    const button = event.target.closest(".show");
    if (!button) return;
    const first = Number(button.dataset.first), last = Number(button.dataset.last);
    const margin = Math.max(10, (last - first) * 0.1);
    zoom(first - margin, last + margin);
    document.querySelector(".panels").scrollIntoView({behavior: "smooth", block: "start"});
  });
}

function redrawWhenResized() {
  let timer = null;
  new ResizeObserver(() => {
    clearTimeout(timer);
    timer = setTimeout(async () => {
      for (const {panel, place, width} of [...charts.values()]) {
        if (Math.floor(place.clientWidth) !== width) await draw(panel);
      }
      placeCursors();
    }, 120);
  }).observe(document.querySelector("main"));
}

async function begin() {
  try {
    const theme = localStorage.getItem("midstep-theme");
    if (theme) document.documentElement.dataset.theme = theme;
  } catch { /* a file may have no storage */ }
  const range = /^#(\d+)-(\d+)$/.exec(location.hash);
  if (range) [shown.lo, shown.hi] = [Math.max(DATA.lo, +range[1]), Math.min(DATA.hi, +range[2])];
  if (!(shown.hi > shown.lo)) [shown.lo, shown.hi] = [DATA.lo, DATA.hi];
  showRange();
  listenToButtons();
  document.querySelectorAll(".chart").forEach(listen);
  await drawAll();
  redrawWhenResized();
  document.documentElement.dataset.drawn = String(charts.size);
  if (WATCHING !== null) watch();
}
// What a chart says in words and figures, without closing what somebody has opened.
function refreshWords(data, frames) {
  const fresh = document.createElement("template");
  fresh.innerHTML = frames;
  for (const {id, label} of data.panels) {
    document.querySelector(`[data-panel="${id}"]`).setAttribute("aria-label", label);
    const [now, then] = [document, fresh.content].map(of => of.querySelector(`#panel-${id} .scroll`));
    if (now && then) now.innerHTML = then.innerHTML;
  }
}

// While the run goes on: draw what is new in place. Zoom, colours and place on the page stay.
async function refresh(answer) {
  const {key, data, parts} = await answer.json();
  state.key = key;
  const wasWhole = shown.lo === DATA.lo && shown.hi === DATA.hi;
  const framesOf = these => JSON.stringify(these.panels.map(panel => [panel.id, panel.groups]));
  const isSame = framesOf(data) === framesOf(DATA);
  DATA = data;
  for (const name of ["facts", "verdict", "foot"]) $(name).innerHTML = parts[name];
  if (wasWhole) [shown.lo, shown.hi] = [data.lo, data.hi];
  if (isSame) {
    for (const panel of data.panels) {
      const chart = charts.get(panel.id);
      if (chart) chart.panel = panel;
    }
    refreshWords(data, parts.panels);
    await zoom(shown.lo, shown.hi);
  } else {
    charts.forEach(({view}) => view.finalize());
    charts.clear();
    $("panels").innerHTML = parts.panels;
    document.querySelectorAll(".chart").forEach(listen);
    await drawAll();
    showRange();
  }
  document.documentElement.dataset.updates = String(Math.max(...DATA.runs.map(run => run.updates)));
}

async function watch() {
  state.key = WATCHING;
  for (;;) {
    await new Promise(resolve => setTimeout(resolve, document.hidden ? 10000 : 2000));
    try {
      const answer = await fetch(`data?key=${encodeURIComponent(state.key)}`);
      document.documentElement.dataset.server = "here";
      if (answer.status === 200) await refresh(answer);
    } catch {
      document.documentElement.dataset.server = "gone";  // it may come back
    }
  }
}

// For whoever opens the console.
window.report = {charts, shown, zoom, get data() { return DATA; }};
begin();
