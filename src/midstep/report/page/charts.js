// The charts: one Vega view a panel, all showing the same updates.

const $ = id => document.getElementById(id);
let DATA = JSON.parse($("data").textContent);
const charts = new Map();
const shown = {lo: DATA.lo, hi: DATA.hi};

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function specOf(panel, width) {
  const theme = DATA.themes[isDark() ? "dark" : "light"];
  const spec = structuredClone(panel.spec);
  if (panel.id === "verdicts") {
    spec.encoding.color.scale.range = theme.ends;
    spec.encoding.stroke.scale.range = theme.ends;
  }
  const y = spec.encoding && spec.encoding.y;
  if (y && y.axis && y.axis.labelLimit) {
    // Long names of layers would leave no room for the cells; their ends tell them apart.
    const most = Math.max(12, Math.round(Math.min(220, width / 3.4) / 5.4));
    y.axis.labelExpr = `length(datum.label) > ${most} ? '\u2026' + slice(datum.label, -${most - 1}) : datum.label`;
    y.axis.labelLimit = 260;
  }
  spec.config = structuredClone(theme.config);
  spec.config.axisX.tickCount = width < 420 ? 4 : 6;
  spec.autosize = {type: "fit-x", contains: "padding"};
  spec.padding = {left: 0, right: 6, top: panel.groups.length || panel.lines.length ? 18 : 4, bottom: 0};
  spec.width = width;
  return spec;
}

function tablesOf(panel, width) {
  const {lo, hi} = shown, tables = {};
  for (const [name, table] of Object.entries(panel.tables)) tables[name] = tableRows(table, lo, hi);
  if (panel.lines.length) {
    tables.lines = lineRows(panel, DATA.runs, lo, hi, Math.max(60, Math.round(width / 2)));
  }
  return tables;
}

function feed(panel, view) {
  for (const [name, rows] of Object.entries(tablesOf(panel, view.width()))) view.data(name, rows);
  return view.signal("lo", shown.lo).signal("hi", shown.hi);
}

async function draw(panel) {
  const place = document.querySelector(`[data-panel="${panel.id}"]`);
  const width = Math.floor(place.clientWidth);
  if (!width) return;
  const old = charts.get(panel.id);
  const tables = tablesOf(panel, width);
  const patch = spec => {
    for (const source of spec.data) if (tables[source.name]) source.values = tables[source.name];
    for (const signal of spec.signals) if (signal.name in shown) signal.value = shown[signal.name];
    return spec;
  };
  const node = document.createElement("div");
  const {view} = await vegaEmbed(node, specOf(panel, width), {
    actions: false, renderer: "canvas", mode: "vega-lite", tooltip: false, hover: false, patch,
    logLevel: 1,
  });
  if (old) old.view.finalize();
  place.querySelectorAll(":scope > div").forEach(drawn => drawn.remove());
  place.append(node);
  place.style.minHeight = "";
  charts.set(panel.id, {panel, place, view, width});
}

async function drawAll() {
  for (const panel of DATA.panels) await draw(panel);
  placeCursors();
}

// Show other updates in every chart.
let moving = false;
async function zoom(lo, hi) {
  lo = Math.max(DATA.lo, Math.round(lo));
  hi = Math.min(DATA.hi, Math.round(hi));
  if (!(hi > lo)) [lo, hi] = [Math.max(DATA.lo, lo - 1), Math.min(DATA.hi, lo + 1)];
  [shown.lo, shown.hi] = [lo, hi];
  showRange();
  if (moving) return;  // the loop below sees the newest range
  moving = true;
  let drawn;
  do {
    drawn = `${shown.lo} ${shown.hi}`;
    for (const {panel, view} of charts.values()) await feed(panel, view).runAsync();
  } while (drawn !== `${shown.lo} ${shown.hi}`);
  moving = false;
  placeCursors();
}

function showRange() {
  const words = n => Math.round(n).toLocaleString("en");
  for (const [id, value] of [["from", shown.lo], ["to", shown.hi]]) {
    if (document.activeElement !== $(id)) $(id).value = words(value);
  }
  $("whole").disabled = shown.lo === DATA.lo && shown.hi === DATA.hi;
  const isPart = !$("whole").disabled;
  history.replaceState(null, "", isPart ? `#${shown.lo}-${shown.hi}` : location.pathname + location.search);
}

// Where an update is in a chart, and which update is at a place.
const leftOf = chart => chart.view.origin()[0] + chart.view.padding().left;
const pixelOf = (chart, u) => chart.view.scale("x")(u) + leftOf(chart);
const updateAt = (chart, pixel) => chart.view.scale("x").invert(pixel - leftOf(chart));
function frameOf(chart) {
  return {left: leftOf(chart), top: chart.view.origin()[1] + chart.view.padding().top,
          width: chart.view.width(), height: chart.view.height()};
}
