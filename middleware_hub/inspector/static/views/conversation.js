// One conversation: the tree of its branches, its turns, and the tokens of the branch that was chosen.

import { COLOURINGS, legend } from "../lib/colours.js";
import { h, labelled, put, select } from "../lib/dom.js";
import { conversationAt, href, replace } from "../lib/route.js";
import { Tokens, pathOf, source } from "../lib/source.js";
import { turnCount } from "../lib/turns.js";
import { count, isolated, percent, plural } from "../lib/words.js";
import { details, imageDetails, imageSentence, sentence } from "./details.js";
import { showImage } from "./dialogs.js";
import { Downloads } from "./downloads.js";
import { findingsBar } from "./findings.js";
import { Follow } from "./follow.js";
import { exactness, trouble, versions } from "./marks.js";
import { Search } from "./search.js";
import { Strip } from "./strip.js";
import { tree } from "./tree.js";
import { Turns } from "./turns.js";

const POLL = 400; // ms until the first question whether the drift is known; each further one waits longer
const MOST_POLL = 5000;

/** Shows a conversation in `main`; returns what the page needs to close it and for its keys. */
export async function conversation(main, { parts: [id, wanted], fields }) {
  const early = wanted === undefined ? null : source.get(pathOf(id, wanted));
  early?.catch(() => null); // it is awaited below
  const whole = await source.get(pathOf(id));
  const newest = whole.branches_list.reduce((best, branch) => (best && best.updated >= branch.updated ? best : branch), null);
  const branch = wanted ?? newest?.id;
  if (branch === undefined) return put(main, h("p", { class: "empty" }, "This conversation has no tokens yet."));
  const head = await (early ?? source.get(pathOf(id, branch)));
  const view = new Conversation(main, whole, branch, head, fields);
  view.draw();
  return view;
}

class Conversation {
  #closed = false;
  #timer = 0;

  constructor(main, whole, branch, head, fields) {
    this.main = main;
    this.whole = whole;
    this.branch = branch;
    this.head = head;
    this.path = pathOf(whole.id, branch);
    this.mode = COLOURINGS.some(([mode]) => mode === fields.by) ? fields.by : "mask";
    this.follow = new Follow(whole, branch, fields.follow === "1" && !source.saved, (next) => conversationAt(whole.id, next, this.#fields()), () => this.#remember());
    const newest = this.follow.on ? head.turns.findLast((turn) => turn.sampled)?.start ?? null : null;
    this.first = fields.t === undefined ? newest : Number(fields.t);
  }

  draw() {
    const { head, whole } = this;
    this.said = h("p", { class: "hidden", "aria-live": "polite" });
    this.panel = h("aside", { class: "details", "aria-label": "Token details" }, this.#hint());
    this.legend = h("div", { class: "legend" });
    this.stands = h("div", { class: "stands" });
    this.error = h("div");
    this.tokens = new Tokens(this.path, head.total);
    this.strip = new Strip({
      head, tokens: this.tokens, mode: this.mode, onselect: (index) => this.#looked(index), onopen: showImage, onerror: (error) => put(this.error, trouble(error)),
    });
    this.turns = new Turns(head, (start) => this.goTo(start));
    this.search = new Search(this.path, this.strip);
    const colours = select({ onchange: (event) => this.colour(event.target.value) }, COLOURINGS, this.mode);
    this.colours = colours;
    const branches = whole.branches_list.length > 1 && labelled("Branch", select(
      { class: "branch", onchange: (event) => (location.hash = conversationAt(whole.id, event.target.value, { by: this.mode })) },
      whole.branches_list.map((one, place) => [one.id, `${place + 1}. ${isolated(one.label || one.id)}`]), this.branch));
    const others = this.#compare();
    const wide = !matchMedia("(max-width: 700px)").matches;
    put(this.main,
      h("header", { class: "head" },
        h("h1", { class: "title", dir: "auto" }, whole.title || whole.id),
        this.#facts()),
      this.stands,
      this.error,
      h("div", { class: "conversation" },
        h("nav", { class: "side", "aria-label": "Branches and turns" },
          !source.saved && this.follow.element,
          h("details", { class: "fold", open: wide && whole.branches_list.length > 1 },
            h("summary", null, plural(whole.branches_list.length, "branch", "branches")),
            tree(whole, this.branch)),
          h("details", { class: "fold turns", open: wide },
            h("summary", null, plural(turnCount(head.turns), "turn")),
            this.turns.element)),
        h("section", { class: "middle", "aria-label": "Text in tokens" },
          h("div", { class: "bar" }, branches, labelled("Colour by", colours), this.search.element, others, new Downloads(this.path, head, whole).element),
          this.legend,
          h("p", { id: "strip-help", class: "hidden" }, "Arrow keys move by token and line, n and p by turn, d to the next drift, question mark lists all keys."),
          this.strip.element),
        this.panel),
      this.said);
    (this.main.querySelector(".tree [aria-current]") ?? [...this.main.querySelectorAll(".tree .on")].at(-1))?.scrollIntoView({ block: "nearest" });
    this.turns.show();
    this.#explain();
    if (!head.total) this.strip.empty("This branch has no tokens.");
    if (this.first !== null && Number.isFinite(this.first)) this.strip.select(this.first, { centre: true });
    this.strip.element.focus({ preventScroll: true });
    this.#poll();
  }

  close() {
    this.#closed = true;
    clearTimeout(this.#timer);
    this.strip.close();
    this.follow.close();
  }

  /** Goes to a token; with `byDrift` to the next one with drift, in the colours of drift. */
  async goTo(index, byDrift = false) {
    if (byDrift) {
      this.colour("drift");
      const next = await this.#nextDrift(index, 1);
      return this.strip.select(next ?? index, { centre: true });
    }
    return this.strip.select(index, { centre: true });
  }

  colour(mode) {
    if (mode === this.mode) return;
    this.mode = mode;
    this.colours.value = mode;
    this.strip.colour(mode, this.head);
    this.#explain();
    this.#remember();
  }

  /** What a key does; returns whether it does anything here. */
  key(event) {
    const at = this.strip.selected;
    const inStrip = event.target.closest(".strip") || !event.target.closest("input, select, textarea, button, a, summary, .long");
    const moves = {
      ArrowLeft: () => this.strip.step(-1),
      ArrowRight: () => this.strip.step(1),
      ArrowUp: () => (at < 0 ? this.strip.select(0) : this.strip.line(-1)),
      ArrowDown: () => (at < 0 ? this.strip.select(0) : this.strip.line(1)),
      Home: () => this.strip.select(0),
      End: () => this.strip.select(this.head.total - 1),
      ...(this.strip.image && !event.target.closest("button") && { Enter: () => showImage(this.strip.image) }),
    };
    const jumps = {
      n: () => this.#turn(1),
      p: () => this.#turn(-1),
      d: () => this.#drift(1),
      D: () => this.#drift(-1),
      c: () => this.#nextColour(),
      "/": () => this.search.focus(),
      g: () => this.search.askPosition(this.head.total, (index) => this.goTo(index), at),
    };
    const does = (inStrip ? moves[event.key] : null) ?? jumps[event.key];
    does?.();
    return Boolean(does);
  }

  #hint() {
    return h("p", { class: "dim hint" }, "Choose a token, with the mouse or the arrow keys, to see its id, logprob and origin. ",
      h("kbd", null, "?"), " lists the keys.");
  }

  #facts() {
    const { head, whole } = this;
    const sampled = whole.branches_list.find((one) => one.id === this.branch)?.sampled ?? whole.sampled;
    const reward = whole.branches_list.find((one) => one.id === this.branch)?.reward ?? whole.reward;
    const facts = [
      ["kind", whole.kind],
      ["tokens", count(head.total)],
      ["sampled", `${count(sampled)} (${percent(sampled, head.total)})`],
      [head.versions.length === 1 ? "version" : "versions", versions(head.versions)],
      head.images?.length > 0 && ["images", count(head.images.length)],
      reward !== null && reward !== undefined && ["reward", String(reward)],
      whole.namespace && ["namespace", whole.namespace],
      whole.adapter && ["adapter", whole.adapter],
      whole.model && ["model", whole.model],
      whole.group && !source.saved && ["group", h("a", { href: href("overview", [], { group: whole.group }), class: "id" }, whole.group)],
      ["id", h("span", { class: "id" }, whole.id)],
    ].filter(Boolean);
    return h("dl", { class: "facts" },
      h("div", null, h("dt", { class: "hidden" }, "exactness"), h("dd", { "data-fact": "exact" }, exactness(head.exact, head.reasons))),
      facts.map(([label, value]) => h("div", null, h("dt", null, label), h("dd", { "data-fact": label }, value))));
  }

  #compare() {
    if (source.saved) return null;
    const other = this.whole.branches_list.find((one) => one.id !== this.branch);
    const fields = { a: this.whole.id, a_branch: this.branch, ...(other ? { b: this.whole.id, b_branch: other.id } : {}) };
    return h("a", { class: "button", href: href("compare", [], fields) }, "Compare …");
  }

  #explain() {
    put(this.legend, legend(this.mode, this.head));
    put(this.stands, findingsBar(this.head, (index, byDrift) => this.goTo(index, byDrift)));
  }

  #looked(index) {
    const token = this.tokens.token(index);
    if (!token) return;
    const { image } = this.strip;
    const link = conversationAt(this.whole.id, this.branch, { t: index, by: this.mode });
    put(this.panel, image ? imageDetails(image, token, this.head, link) : details(token, this.head, link));
    this.said.textContent = image ? imageSentence(image, token, this.head) : sentence(token, this.head);
    this.turns.at(token.turn);
    this.#remember();
  }

  #remember() {
    const t = this.strip.selected >= 0 ? this.strip.selected : undefined;
    replace("conversation", [this.whole.id, this.branch], { t, ...this.#fields() });
  }

  #fields() {
    return { by: this.mode === "mask" ? undefined : this.mode, follow: this.follow.on ? 1 : undefined };
  }

  #turn(direction) {
    const sampled = this.head.turns.filter((turn) => turn.sampled);
    const turns = sampled.length ? sampled : this.head.turns;
    if (!turns.length) return;
    const at = this.strip.selected;
    let next = direction > 0 ? turns.findIndex((turn) => turn.start > at) : turns.findLastIndex((turn) => turn.start < at);
    if (next < 0) next = direction > 0 ? turns.length - 1 : 0;
    this.goTo(turns[next].start);
  }

  #nextColour() {
    const modes = COLOURINGS.map(([mode]) => mode);
    this.colour(modes[(modes.indexOf(this.mode) + 1) % modes.length]);
  }

  async #drift(direction) {
    const current = this.strip.selected >= 0 ? this.tokens.token(this.strip.selected)?.drift : null;
    const from = current ? (direction > 0 ? current.end : current.start - 1) : this.strip.selected;
    const next = await this.#nextDrift(from, direction);
    this.colour("drift"); // whose legend says how much there is, also if it is none
    if (next === null) this.said.textContent = "no further drift";
    else this.strip.select(next, { centre: true });
  }

  /** The first token of the next drift at or behind `from`, or before it. Only turns that have drift are asked for. */
  async #nextDrift(from, direction) {
    const inside = (index) => this.head.turns.some((turn) => turn.drifted > 0 && turn.start <= index && index < turn.end);
    const known = this.head.turns.some((turn) => typeof turn.drifted === "number");
    const { size } = this.tokens;
    let index = Math.max(0, Math.min(from, this.head.total - 1));
    while (index >= 0 && index < this.head.total && !this.#closed) {
      const start = Math.floor(index / size) * size;
      const last = Math.min(start + size, this.head.total) - 1;
      const worthIt = !known || this.head.turns.some((turn) => turn.drifted > 0 && turn.start <= last && turn.end > start) || inside(index);
      if (worthIt) {
        const spans = (await this.tokens.fetch(index)).drift ?? [];
        const fitting = spans.filter((span) => (direction > 0 ? span.start >= from : span.start <= from));
        if (fitting.length) return direction > 0 ? fitting[0].start : fitting.at(-1).start;
      }
      index = direction > 0 ? start + size : start - 1;
    }
    return null;
  }

  /** Asks again until the drift of the branch is known. */
  #poll(pause = POLL) {
    if (this.head.drift || source.saved) return;
    this.#timer = setTimeout(async () => {
      try {
        const head = await source.get(this.path);
        if (this.#closed) return;
        if (head.drift && head.total === this.head.total) this.#news(head);
        else this.#poll(Math.min(1.5 * pause, MOST_POLL));
      } catch (error) {
        put(this.error, trouble(error));
      }
    }, pause);
  }

  #news(head) {
    this.head = head;
    this.tokens.forget();
    this.strip.colour(this.mode, head);
    this.turns.show(head);
    this.#explain();
  }
}

