// The turns of a branch as a list of lines: what each was, how long, how it ended, and its share of drift.

import { h } from "../lib/dom.js";
import { LongList } from "../lib/list.js";
import { nameOf, numbers, sampledOf } from "../lib/turns.js";
import { INEXACT, ending, float, percent, plural, short } from "../lib/words.js";

const HEIGHT = 34;

export class Turns {
  #current = -1;

  /** `goTo(index)` is called with the first token of the turn that was chosen. */
  constructor(head, goTo) {
    this.head = head;
    this.goTo = goTo;
    this.list = new LongList({ label: "Turns", height: HEIGHT, draw: (number) => this.#line(number) });
    this.element = this.list.element;
  }

  show(head = this.head) {
    this.head = head;
    this.longest = head.turns.reduce((most, turn) => Math.max(most, turn.end - turn.start), 1);
    this.list.show(head.turns.length);
  }

  /** Marks the turn that is looked at. */
  at(number) {
    if (number === this.#current || number < 0) return;
    this.#current = number;
    this.list.reveal(number);
    this.list.show(this.head.turns.length);
  }

  #line(number) {
    const turn = this.head.turns[number];
    const [word, wrong] = ending(turn.finish);
    const length = turn.end - turn.start;
    const share = turn.drifted > 0 ? percent(turn.drifted, sampledOf(turn)) : "";
    const why = (turn.reasons ?? []).filter((reason) => INEXACT.has(reason)).join(", ");
    const read = [nameOf(this.head.turns, number), turn.role, plural(length, "token"), why, wrong && word, share && `${share} drift`,
      typeof turn.logprob === "number" && `mean logprob ${float(turn.logprob, 2)}`];
    return h("button", {
      type: "button",
      class: `turn ${turn.sampled ? "" : "between"} ${number === this.#current ? "on" : ""}`,
      "aria-current": number === this.#current ? "true" : null,
      "aria-label": read.filter(Boolean).join(", "),
      onclick: () => this.goTo(turn.start),
    },
    h("span", { class: "turn-number" }, numbers(this.head.turns)[number] || ""),
    h("span", { class: "turn-role" }, turn.role),
    h("span", { class: "turn-bar" }, h("i", { class: turn.sampled ? "sampled" : "", style: { width: `${Math.max(2, (100 * length) / this.longest)}%` } })),
    h("span", { class: "turn-marks" }, why && h("span", { class: "mark bad", title: why }, "inexact"), wrong && h("span", { class: "mark bad" }, word), share && h("span", { class: "mark drift" }, share)),
    h("span", { class: "turn-tokens" }, short(length)));
  }
}
