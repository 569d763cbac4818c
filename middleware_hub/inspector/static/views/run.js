// All that is remembered, as a report: drift, reasons, staleness, reuse, logprobs, tokens over time.

import { bars, columns, figure, histogram, ranges } from "../lib/charts.js";
import { HUES } from "../lib/colours.js";
import { h, put, table } from "../lib/dom.js";
import { drawn } from "../lib/glyphs.js";
import { facts, named, thumbnail } from "../lib/images.js";
import { href } from "../lib/route.js";
import { source } from "../lib/source.js";
import { REASONS, bytes, clock, count, float, percent, plural } from "../lib/words.js";
import { showImage } from "./dialogs.js";
import { trouble, when } from "./marks.js";

const FEW = 6; // pairs that are shown at once
const POLL = 1000; // ms, while it is computed

export async function run(main) {
  const view = new Run(main);
  await view.load();
  return view;
}

class Run {
  #closed = false;
  #timer = 0;

  constructor(main) {
    this.main = main;
  }

  close() {
    this.#closed = true;
    clearTimeout(this.#timer);
  }

  async load() {
    const report = await source.get("/run");
    if (this.#closed) return;
    put(this.main, header(report, () => this.load()), report.conversations ? body(report) : empty());
    if (report.done || source.saved) return;
    this.#timer = setTimeout(() => this.load().catch((error) => put(this.main, trouble(error))), POLL);
  }
}

function header(report, again) {
  return h("header", { class: "head" }, h("h1", null, "Run"),
    h("p", { class: "sum" },
      report.done ? ["Read ", when(report.computed_at), ". "] : ["Reading: ", h("b", null, `${Math.floor(100 * report.progress)}%`), ". ", h("progress", { value: report.progress, max: 1, "aria-label": "read" })],
      report.done && !source.saved && h("button", { type: "button", class: "plain", onclick: again }, "Read again")),
    h("dl", { class: "tiles" },
      tile("conversations", count(report.conversations)),
      tile("tokens", count(report.tokens), "each once"),
      tile("sampled", count(report.sampled_tokens), percent(report.sampled_tokens, report.tokens)),
      report.drift && tile("drift", percent(report.drift.drifted_tokens, report.drift.sampled_tokens), `${count(report.drift.drifted_tokens)} tokens`),
      report.images?.count > 0 && tile("images", count(report.images.count), `${count(report.images.distinct)} different`),
      report.reuse && tile("not encoded again", percent(report.reuse.reused_tokens, report.reuse.prompt_tokens), "of prompt tokens")));
}

const sum = (rows, key) => (rows ?? []).reduce((all, row) => all + row[key], 0);

const tile = (label, value, more) => h("div", { class: "tile" }, h("dt", null, label), h("dd", null, h("b", { "data-tile": label }, value), more && h("span", { class: "dim" }, " ", more)));

const empty = () => h("div", { class: "empty" }, h("h2", null, "Nothing to report yet"), h("p", null, "The report is about all that this router remembers. ", h("a", { href: href("overview") }, "The overview"), " says how to send something."));

function body(report) {
  return h("div", { class: "figures" }, drift(report.drift), pairs(report.drift), inexact(report), versionsOverTime(report.sampled_over_time ?? []), logprobs(report.logprobs), byVersion(report.logprobs), staleness(report.staleness ?? []), reuse(report.reuse), images(report));
}

function drift(found) {
  if (!found) return null;
  const kinds = found.by_kind;
  return figure({
    title: "Drift by kind of token",
    note: `${count(found.drifted_tokens)} of ${count(found.sampled_tokens)} sampled tokens (${percent(found.drifted_tokens, found.sampled_tokens)}) would change if their text was encoded again. A trainer that does so trains tokens that were never sampled.`,
    chart: bars(kinds.map((one) => ({ label: one.kind, value: one.drifted, of: one.tokens, text: `${percent(one.drifted, one.tokens)}` })), "Drift by kind of token", "with-of"),
    head: ["kind", "sampled tokens", "would change", "share"],
    rows: kinds.map((one) => [one.kind, count(one.tokens), count(one.drifted), percent(one.drifted, one.tokens)]),
    numeric: [1, 2, 3],
  });
}

const boxes = (texts, kind) => h("span", { class: "spelling" }, texts.map((text) => h("span", { class: `t ${kind}`, dir: "auto" }, drawn(text, null))));

function pairs(found) {
  if (!found) {
    return h("section", { class: "figure", "aria-label": "Drift" }, h("h2", null, "Drift"),
      h("p", { class: "empty" }, "Nothing is known of drift without the model's tokenizer. For a report about a store, give it as --tokenizer-path."));
  }
  const all = found.pairs;
  return h("section", { class: "figure", "aria-label": "Commonest drift" }, h("h2", null, "Commonest drift"),
    h("p", { class: "dim" }, "What the model sampled, and what the same text is encoded to."),
    all.length ? pairTable(all.slice(0, FEW), "Commonest drift") : h("p", { class: "empty" }, "No drift was found."),
    all.length > FEW && h("details", { class: "numbers" }, h("summary", null, `${all.length - FEW} more`), pairTable(all.slice(FEW), "Further drift")));
}

function pairTable(all, caption) {
  return h("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": `${caption}: table` }, h("table", null, h("caption", { class: "hidden" }, caption),
    h("thead", null, h("tr", null, h("th", { scope: "col" }, "sampled"), h("th", { scope: "col" }, "encoded again"), h("th", { scope: "col", class: "number" }, "times"))),
    h("tbody", null, all.map((pair) => h("tr", null, h("td", null, boxes(pair.sampled, "s drifted")), h("td", null, boxes(pair.encoded, "encoded")), h("td", { class: "number" }, count(pair.count)))))));
}

function inexact(report) {
  const rows = report.inexact ?? [];
  return figure({
    title: "Reasons for doubt",
    note: "Conversations with a reason why they are not exact, or not in every way. A conversation may have several.",
    chart: rows.length ? bars(rows.map((row) => ({ label: h("a", { href: href("overview", [], { reason: row.reason }), title: REASONS[row.reason] }, row.reason), value: row.conversations })), "Reasons") : h("p", null, h("span", { class: "mark good" }, "exact"), ` All ${count(report.conversations)} conversations are exact, in every way.`),
    head: ["reason", "conversations", "meaning"],
    rows: rows.length ? rows.map((row) => [row.reason, count(row.conversations), REASONS[row.reason] ?? ""]) : [["none", "0", ""]],
    numeric: [1],
  });
}

function versionsOverTime(points) {
  const versions = [...new Set(points.map((point) => point.version))];
  return figure({
    title: "Sampled tokens over time, by weight version",
    chart: points.length ? h("div", null, columns(points, versions, "Sampled tokens over time"), h("div", { class: "legend" }, versions.slice(0, 12).map((version, place) => h("span", { class: "key" }, h("i", { class: `swatch chart-h${place % HUES}` }), version)), versions.length > 12 && h("span", { class: "dim" }, `and ${versions.length - 12} more`))) : null,
    head: ["time", "version", "tokens"],
    rows: points.map((point) => [clock(point.time), point.version, count(point.tokens)]),
    numeric: [2],
  });
}

function logprobs(found) {
  const counts = found?.counts ?? [];
  return figure({
    title: "Logprobs of sampled tokens",
    chart: histogram(found?.edges ?? [], counts, "Logprobs of sampled tokens"),
    head: ["from", "to", "tokens"],
    rows: counts.map((value, place) => [float(found.edges[place]), float(found.edges[place + 1]), count(value)]),
    numeric: [0, 1, 2],
  });
}

function byVersion(found) {
  const rows = found?.by_version ?? [];
  return figure({
    title: "Logprobs by weight version",
    note: "From percentile 5 to 95; the dot is the median, the line across it the mean.",
    chart: ranges(rows.map((row) => ({ label: row.version, ...row })), "Logprobs by weight version"),
    head: ["version", "mean", "p05", "p50", "p95"],
    rows: rows.map((row) => [row.version, float(row.mean), float(row.p05), float(row.p50), float(row.p95)]),
    numeric: [1, 2, 3, 4],
  });
}

function staleness(rows) {
  const all = sum(rows, "tokens");
  return figure({
    title: "Staleness of sampled tokens",
    note: "How many weight versions lie between the newest one and that of a token.",
    chart: bars(rows.map((row) => ({ label: String(row.versions_behind), value: row.tokens, text: percent(row.tokens, all) })), "Staleness"),
    head: ["versions behind", "tokens", "share"],
    rows: rows.map((row) => [String(row.versions_behind), count(row.tokens), percent(row.tokens, all)]),
    numeric: [0, 1, 2],
  });
}

function reuse(found) {
  if (!found) return null;
  const rest = found.prompt_tokens - found.reused_tokens;
  return figure({
    title: "Prompt tokens",
    chart: bars([{ label: "from memory", value: found.reused_tokens, text: percent(found.reused_tokens, found.prompt_tokens) }, { label: "encoded", value: rest, text: percent(rest, found.prompt_tokens) }], "Prompt tokens"),
    head: ["prompt tokens", "count"],
    rows: [["from memory", count(found.reused_tokens)], ["encoded", count(rest)], ["all prompts", count(found.prompt_tokens)]],
    numeric: [1],
  });
}

/** How many images there are, and those that occur most often. */
function images(report) {
  const found = report.images;
  if (!found?.count) return null;
  const files = found.held ? ` The files of ${count(found.held)} of them are held: ${bytes(found.bytes)}.` : "";
  return h("section", { class: "figure", "aria-label": "Images" }, h("h2", null, "Images"),
    h("p", { class: "dim" }, `${plural(found.count, "image")}, ${count(found.distinct)} different, are ${plural(found.tokens, "token")} (${percent(found.tokens, report.tokens)} of all).${files}`),
    table("Commonest images", ["image", "times", "tokens each", "file"], found.commonest.map((image) => [
      h("button", { type: "button", class: "picture small", onclick: () => showImage(image), "aria-label": `Open image, ${facts(image)}, ${image.digest}` }, thumbnail(image), h("span", { class: "id" }, named(image.digest))),
      count(image.times), count(image.tokens), facts(image)]), [1, 2]));
}
