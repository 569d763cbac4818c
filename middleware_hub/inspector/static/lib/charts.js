// Charts as SVG. Each stands with its numbers as a table: a chart is never the only place where a number is.

import { h, name, s, table } from "./dom.js";
import { HUES } from "./colours.js";
import { clock, count, short } from "./words.js";

const WIDTH = 640;

/** A chart and the table of its numbers, which opens below it. */
export function figure({ title, note, chart, head, rows, numeric }) {
  const id = name("figure");
  return h("section", { class: "figure", "aria-labelledby": id },
    h("h2", { id }, title),
    note && h("p", { class: "dim" }, note),
    chart,
    rows.length ? h("details", { class: "numbers" }, h("summary", null, "Numbers"), table(title, head, rows, numeric)) : h("p", { class: "empty" }, "Nothing to show yet."));
}

/** Bars to the right, one for each `{label, value, text, of}`; behind a bar stands what it is a part of. */
export function bars(rows, title, kind = "") {
  if (!rows.length) return null;
  const most = Math.max(...rows.map((row) => row.of ?? row.value), 1e-9);
  return h("ul", { class: `bars ${kind}`, "aria-label": title }, rows.map((row) => h("li", null,
    h("span", { class: "bar-label", dir: "auto" }, row.label),
    h("span", { class: "bar-track", "aria-hidden": "true" },
      row.of !== undefined && h("i", { class: "bar-of", style: { width: `${(100 * row.of) / most}%` } }),
      h("i", { class: "bar-value", style: { width: `${(100 * row.value) / most}%` } })),
    h("span", { class: "bar-text" }, row.text ?? count(row.value)))));
}

/** A histogram: `counts` between neighbouring `edges`. */
export function histogram(edges, counts, title) {
  if (!counts?.length) return null;
  const [height, left, bottom] = [160, 44, 22];
  const most = Math.max(...counts, 1);
  const [low, high] = [edges[0], edges.at(-1)];
  const x = (value) => left + ((value - low) / (high - low || 1)) * (WIDTH - left - 20);
  const y = (value) => 8 + (1 - value / most) * (height - bottom - 8);
  return drawing(height, title, [
    ...grid(most, y, left, count),
    ...counts.map((value, place) => s("rect", {
      x: x(edges[place]) + 0.5, y: y(value), width: Math.max(0.5, x(edges[place + 1]) - x(edges[place]) - 1), height: Math.max(0, y(0) - y(value)), class: "chart-bar",
    }, s("title", null, `${edges[place].toFixed(2)} to ${edges[place + 1].toFixed(2)}: ${count(value)}`))),
    ...ticks(low, high, 5).map((value) => s("text", { x: x(value), y: height - 6, class: "chart-text", "text-anchor": "middle" }, value.toFixed(1).replace("-", "−"))),
  ]);
}

/** Ranges: for each row a thin line from p05 to p95, and a mark at p50, with one line of text each. */
export function ranges(rows, title) {
  if (!rows.length) return null;
  const [line, left] = [26, 120];
  const height = rows.length * line + 26;
  const low = Math.min(...rows.map((row) => row.p05));
  const high = Math.max(...rows.map((row) => row.p95), low + 1e-9);
  const x = (value) => left + ((value - low) / (high - low)) * (WIDTH - left - 24);
  return drawing(height, title, [
    ...rows.flatMap((row, place) => {
      const y = place * line + 15;
      return [
        s("text", { x: 0, y: y + 4, class: "chart-text strong" }, row.label.length > 16 ? `${row.label.slice(0, 15)}…` : row.label),
        s("line", { x1: x(row.p05), x2: x(row.p95), y1: y, y2: y, class: "chart-range" }),
        s("circle", { cx: x(row.p50), cy: y, r: 5, class: "chart-dot" }, s("title", null, `median ${row.p50.toFixed(3)}`)),
        s("line", { x1: x(row.mean), x2: x(row.mean), y1: y - 7, y2: y + 7, class: "chart-mean" }),
      ];
    }),
    ...ticks(low, high, 4).map((value) => s("text", { x: x(value), y: height - 4, class: "chart-text", "text-anchor": "middle" }, value.toFixed(2).replace("-", "−"))),
  ]);
}

/** Stacked columns over time: `points` are `{time, version, tokens}`. */
export function columns(points, versions, title) {
  if (!points.length) return null;
  const [height, left, bottom] = [180, 52, 22];
  const times = [...new Set(points.map((point) => point.time))].sort((a, b) => a - b);
  const sums = new Map(times.map((time) => [time, 0]));
  for (const point of points) sums.set(point.time, sums.get(point.time) + point.tokens);
  const most = Math.max(...sums.values(), 1);
  const y = (value) => 8 + (1 - value / most) * (height - bottom - 8);
  const each = (WIDTH - left - 8) / times.length;
  const wide = Math.min(each - (each > 4 ? 2 : 0), 48);
  const stacked = new Map(times.map((time) => [time, 0]));
  const boxes = points.map((point) => {
    const from = stacked.get(point.time);
    stacked.set(point.time, from + point.tokens);
    return s("rect", {
      x: left + times.indexOf(point.time) * each + (each - wide) / 2, y: y(from + point.tokens), width: Math.max(0.5, wide), height: Math.max(0, y(from) - y(from + point.tokens)),
      class: `chart-h${versions.indexOf(point.version) % HUES}`,
    }, s("title", null, `${clock(point.time)}, version ${point.version}: ${count(point.tokens)}`));
  });
  const shown = times.length > 1 ? [times[0], times.at(-1)] : times;
  return drawing(height, title, [
    ...grid(most, y, left, short),
    ...boxes,
    ...shown.map((time, place) => s("text", { x: place ? WIDTH - 8 : left, y: height - 6, class: "chart-text", "text-anchor": place ? "end" : "start" }, clock(time).slice(11))),
  ]);
}

function drawing(height, title, children) {
  return s("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": title, class: "chart" }, ...children);
}

function grid(most, y, left, write) {
  return [0, most / 2, most].flatMap((value) => [
    s("line", { x1: left, x2: WIDTH - 8, y1: y(value), y2: y(value), class: "chart-grid" }),
    s("text", { x: left - 6, y: y(value) + 4, class: "chart-text", "text-anchor": "end" }, write(Math.round(value))),
  ]);
}

/** About `wanted` round numbers between two. */
export function ticks(low, high, wanted) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((part) => part * power).find((part) => part >= rough);
  const found = [];
  for (let value = Math.ceil(low / size) * size; value <= high + 1e-9; value += size) found.push(value);
  return found;
}
