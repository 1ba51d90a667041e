// Which updates a chart draws: those in sight, one on either side, and no more than it has pixels.

// The row of the first update that is at least `u`.
function rowAt(updates, u) {
  let low = 0, high = updates.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (updates[middle] < u) low = middle + 1; else high = middle;
  }
  return low;
}

function nearestRow(updates, u) {
  const row = Math.min(rowAt(updates, u), updates.length - 1);
  return row > 0 && u - updates[row - 1] < updates[row] - u ? row - 1 : row;
}

// First, lowest, highest and last of each of `number` buckets: the outline of the line is the same.
function outline(rows, values, number) {
  if (rows.length <= 4 * number) return rows;
  const kept = [];
  for (let bucket = 0; bucket < number; bucket++) {
    const first = Math.floor(bucket * rows.length / number);
    const last = Math.floor((bucket + 1) * rows.length / number) - 1;
    let low = first, high = first;
    for (let i = first; i <= last; i++) {
      if (values[rows[i]] < values[rows[low]]) low = i;
      if (values[rows[i]] > values[rows[high]]) high = i;
    }
    kept.push(...[...new Set([first, low, high, last])].sort((a, b) => a - b).map(i => rows[i]));
  }
  return kept;
}

function lineRows(panel, runs, lo, hi, pixels) {
  const found = [];
  panel.lines.forEach(([index, column, g, dashed, o, w], k) => {
    const run = runs[index], updates = run.columns.update, values = run.columns[column];
    if (!values) return;
    const first = Math.max(0, rowAt(updates, lo) - 1);
    const last = Math.min(updates.length, rowAt(updates, hi + 1e-9) + 1);
    const rows = [];
    for (let row = first; row < last; row++) {
      const v = values[row];
      if (v !== null && (!panel.log || v > 0)) rows.push(row);
    }
    for (const row of outline(rows, values, pixels)) {
      found.push({u: updates[row], v: values[row], g, k, o, w, d: dashed ? 1 : 0});
    }
  });
  return found;
}

// A table of columns as rows, those in sight and one on either side of each line.
function tableRows(table, lo, hi) {
  const names = Object.keys(table), length = names.length ? table[names[0]].length : 0;
  const starts = table.u0 || table.u, ends = table.u1 || table.u, same = table.k || table.g;
  const rows = [];
  const inSight = i => ends[i] >= lo && starts[i] <= hi;
  const beside = i => i >= 0 && i < length && inSight(i);
  for (let i = 0; i < length; i++) {
    if (inSight(i) || (table.u && ((beside(i - 1) && same[i - 1] === same[i]) ||
        (beside(i + 1) && same[i + 1] === same[i])))) {
      const row = {};
      for (const name of names) row[name] = table[name][i];
      rows.push(row);
    }
  }
  return rows;
}
