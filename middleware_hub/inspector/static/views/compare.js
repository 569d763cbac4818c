// Two branches side by side, token by token: where they part, and how likely each token was.

import { h, labelled, put } from "../lib/dom.js";
import { drawn, spelled } from "../lib/glyphs.js";
import { Places, facts, imageAt, thumbnail, tokensOf } from "../lib/images.js";
import { LongList } from "../lib/list.js";
import { conversationAt, href } from "../lib/route.js";
import { lastUpTo } from "../lib/rows.js";
import { Tokens, pathOf, query, source } from "../lib/source.js";
import { count, float, isolated, plural } from "../lib/words.js";
import { showImage } from "./dialogs.js";
import { exactness, trouble, versions } from "./marks.js";

const HEIGHT = 30;

export async function compare(main, { fields }) {
  const [known, chosen] = await Promise.all([source.get("/conversations?limit=50"), fields.a ? source.get(pathOf(fields.a)) : null]);
  const second = fields.b ? (fields.b === fields.a ? chosen : await source.get(pathOf(fields.b))) : null;
  const result = h("section", { "aria-label": "Comparison" });
  put(main, h("header", { class: "head" }, h("h1", null, "Compare two branches")), chooser(known.conversations, fields, chosen, second), result);
  if (!chosen || !second) {
    put(result, h("p", { class: "empty" }, chosen ? "Choose what to compare it with."
      : known.conversations.length ? "Choose two branches: two variants of one text, two branches of a session, or two samples of a group."
        : ["Nothing is remembered yet that could be compared. ", h("a", { href: href("overview") }, "The overview"), " says how to send something."]));
    return {};
  }
  try {
    const branchOf = (whole, id) => id ?? whole.branches_list[0]?.id;
    const [a, b] = [branchOf(chosen, fields.a_branch), branchOf(second, fields.b_branch)];
    const found = await source.get(`/compare${query({ a: fields.a, a_branch: a, b: fields.b, b_branch: b })}`);
    return new Comparison(result, found, [fields.a, a], [fields.b, b]);
  } catch (error) {
    put(result, trouble(error));
    return {};
  }
}

/** Two rows of choices. Samples of the same group come first. */
function chooser(known, fields, first, second) {
  const change = (more) => (location.hash = href("compare", [], { ...fields, ...more }));
  const conversations = (key, whole, label) => {
    const group = first?.group;
    const sorted = [...known].sort((x, y) => Number(y.group === group && Boolean(group)) - Number(x.group === group && Boolean(group)));
    if (whole && !sorted.some((one) => one.id === whole.id)) sorted.unshift(whole);
    const element = h("select", { onchange: (event) => change({ [key]: event.target.value, [`${key}_branch`]: undefined }) },
      !whole && h("option", { value: "", selected: true, disabled: true }, "choose …"),
      sorted.map((one) => h("option", { value: one.id, selected: one.id === whole?.id },
        `${group && one.group === group && key === "b" && one.id !== first?.id ? "same group: " : ""}${isolated((one.title || one.id).slice(0, 60))} · ${plural(one.turns, "turn")} · ${one.id.slice(0, 40)}`)));
    return labelled(label, element);
  };
  const branches = (key, whole, chosen) => whole && labelled("Branch", h("select", { onchange: (event) => change({ [`${key}_branch`]: event.target.value }) },
    whole.branches_list.map((one, place) => h("option", { value: one.id, selected: one.id === chosen }, `${place + 1}. ${isolated(one.label || one.id)}`))));
  return h("div", { class: "chooser" },
    h("div", { class: "bar" }, conversations("a", first, "A"), branches("a", first, fields.a_branch)),
    h("div", { class: "bar" }, conversations("b", second, "B"), branches("b", second, fields.b_branch)));
}

class Comparison {
  #closed = false;
  #waiting = new Set();

  constructor(main, found, a, b) {
    this.found = found;
    this.a = { head: found.a, place: a, tokens: new Tokens(pathOf(...a), found.a.total) };
    this.b = { head: found.b, place: b, tokens: new Tokens(pathOf(...b), found.b.total) };
    this.lines = lay(found.runs, new Places(found.a.images), new Places(found.b.images));
    this.list = new LongList({ label: "Tokens side by side", height: HEIGHT, draw: (number) => this.#line(number) });
    const start = this.lines.starts.findIndex((_, run) => found.runs[run].op !== "equal");
    const first = found.first_difference ? this.lines.starts[Math.max(0, start)] : -1;
    put(main, this.#said(first),
      h("div", { class: "pairs" },
        h("div", { class: "pair-head", "aria-hidden": "true" }, ["A", "B"].map((side) => [h("span", { class: "number" }, side), h("span", null, "token"), h("span", { class: "number" }, "id"), h("span", { class: "number" }, "logprob")])),
        this.list.element));
    this.list.show(this.lines.count);
    if (first >= 0) this.#to(first);
  }

  close() {
    this.#closed = true;
  }

  key(event) {
    const step = { n: 1, p: -1 }[event.key];
    if (!step) return false;
    const at = Math.floor(this.list.element.scrollTop / HEIGHT) + 3;
    const differing = this.lines.starts.filter((_, run) => this.found.runs[run].op !== "equal");
    const next = step > 0 ? differing.find((line) => line > at) : differing.findLast((line) => line < at);
    if (next !== undefined) this.#to(next);
    return true;
  }

  #to(line) {
    this.list.element.scrollTop = Math.max(0, (line - 3) * HEIGHT);
  }

  #said(first) {
    const { first_difference: difference, runs, truncated } = this.found;
    const equal = runs.filter((run) => run.op === "equal").reduce((sum, run) => sum + run.a[1] - run.a[0], 0);
    const image = difference && imageAt(this.found.a.images, difference.a) && imageAt(this.found.b.images, difference.b);
    const side = (name, { head, place }) => h("p", null, h("b", null, `${name} `), h("a", { href: conversationAt(...place) }, plural(head.total, "token")), " ",
      exactness(head.exact, head.reasons), h("span", { class: "dim" }, ` versions ${versions(head.versions)}`));
    return h("div", { class: "said" }, side("A", this.a), side("B", this.b),
      h("p", { "data-fact": "difference" }, difference
        ? [h("b", null, "They part at token ", count(difference.a)), difference.a === difference.b ? "" : ` of A, ${count(difference.b)} of B`, `; ${count(equal)} tokens are the same. `, image && "There they have different images. ",
          h("button", { type: "button", class: "plain", onclick: () => this.#to(first) }, "Show it")]
        : h("b", null, "All tokens are the same."),
      truncated && " The comparison ends early: they are too long and too different.",
      h("span", { class: "dim" }, " n and p go to the next and the previous difference.")));
  }

  #line(number) {
    const { run, a, b } = this.lines.at(number);
    return h("div", { class: `pair-line ${run.op === "equal" ? "" : "differs"}` }, this.#half(this.a, a), this.#half(this.b, b));
  }

  #half(side, index) {
    if (index < 0) return [h("span"), h("span", { class: "dim" }, "–"), h("span"), h("span")];
    const image = imageAt(side.head.images, index);
    if (image) {
      return [
        h("a", { class: "number dim", href: conversationAt(...side.place, { t: index }) }, count(index)),
        h("button", { type: "button", class: "picture small", onclick: () => showImage(image), "aria-label": `Open image, ${facts(image)}, ${image.digest}` }, thumbnail(image), h("span", { class: "id" }, image.digest)),
        h("span", { class: "number", title: plural(tokensOf(image), "token") }, `× ${count(tokensOf(image))}`),
        h("span", { class: "number dim" }, "context"),
      ];
    }
    const token = side.tokens.token(index);
    if (!token) {
      this.#fetch(side, index);
      return [h("span", { class: "number dim" }, count(index)), h("span", { class: "dim" }, "…"), h("span"), h("span")];
    }
    return [
      h("a", { class: "number dim", href: conversationAt(...side.place, { t: index }) }, count(index)),
      h("span", { class: `t ${token.sampled ? "s sampled" : "c"}`, dir: "auto", "aria-label": spelled(token.text, token.bytes), role: "img" }, drawn(token.text, token.bytes)),
      h("span", { class: "number" }, token.id),
      h("span", { class: "number" }, token.sampled ? float(token.logprob) : h("span", { class: "dim" }, "context")),
    ];
  }

  #fetch(side, index) {
    const key = `${side.place.join("\n")}\n${Math.floor(index / side.tokens.size)}`;
    if (this.#waiting.has(key)) return;
    this.#waiting.add(key);
    side.tokens.fetch(index).then(() => {
      this.#waiting.delete(key);
      if (!this.#closed) this.list.show(this.lines.count);
    }, () => this.#waiting.delete(key));
  }
}

/** Lines for aligned runs: as many as the longer side of each. An image has one, as it has one of a side's `Places`. */
function lay(all, ours, theirs) {
  const runs = all.map(({ a, b }) => ({ a: a.map((token) => ours.of(token)), b: b.map((token) => theirs.of(token)) }));
  const starts = [];
  let total = 0;
  for (const { a, b } of runs) {
    starts.push(total);
    total += Math.max(a[1] - a[0], b[1] - b[0]);
  }
  const at = (line) => {
    const number = lastUpTo(starts.length, (place) => starts[place], line);
    const inside = line - starts[number];
    const index = ([from, to], places) => (from + inside < to ? places.token(from + inside) : -1);
    return { run: all[number], a: index(runs[number].a, ours), b: index(runs[number].b, theirs) };
  };
  return { starts, count: total, at };
}
