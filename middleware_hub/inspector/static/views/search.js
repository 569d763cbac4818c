// Searching in a branch, by text or by token ids, and going to a position.

import { h, labelled } from "../lib/dom.js";
import { query, source } from "../lib/source.js";
import { count } from "../lib/words.js";
import { ask } from "./dialogs.js";

const MOST = 200;
const IDS = /^\s*\[?\s*\d+(\s*,\s*\d+)*\s*\]?\s*$/;

/** The ids in "1, 2, 3" or "[1, 2]"; null if it is a text. One number alone is a text. */
export function tokenIds(text) {
  if (!IDS.test(text) || !/[,[]/.test(text)) return null;
  return text.match(/\d+/g).map(Number);
}

export class Search {
  #matches = [];
  #at = -1;
  #asked = "";
  #more = false;

  constructor(path, strip) {
    this.path = path;
    this.strip = strip;
    this.input = h("input", { type: "search", placeholder: "text, or ids: 12, 7", autocomplete: "off", spellcheck: "false" });
    this.result = h("span", { class: "dim result", role: "status" });
    this.element = h("form", {
      class: "search", role: "search",
      onsubmit: (event) => {
        event.preventDefault();
        this.#next(1);
      },
    }, labelled("Search", this.input), this.result);
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && event.shiftKey) {
        event.preventDefault();
        this.#next(-1);
      } else if (event.key === "Escape") {
        this.#clear();
        this.strip.element.focus({ preventScroll: true });
      }
    });
    this.input.addEventListener("search", () => this.input.value || this.#clear());
  }

  focus() {
    this.input.focus();
    this.input.select();
  }

  /** Asks for a position, and goes there. */
  async askPosition(total, goTo, at) {
    const text = await ask({
      title: "Go to a token", label: `Position, from 0 to ${count(total - 1)}`, value: at >= 0 ? String(at) : "", inputmode: "numeric", button: "Go",
    });
    const index = Number((text ?? "").replace(/[,\s]/g, ""));
    if (text && Number.isInteger(index)) goTo(index);
    this.strip.element.focus({ preventScroll: true });
  }

  #clear() {
    this.input.value = "";
    this.#asked = "";
    this.#matches = [];
    this.result.textContent = "";
    this.strip.found([]);
  }

  async #next(direction) {
    const wanted = this.input.value;
    if (!wanted) return this.#clear();
    if (wanted !== this.#asked) {
      this.result.textContent = "searching …";
      const ids = tokenIds(wanted);
      try {
        const found = await source.get(`${this.path}/find${query(ids ? { token_ids: ids.join(","), limit: MOST } : { text: wanted, limit: MOST })}`);
        this.#matches = found.matches;
        this.#more = found.more;
      } catch (error) {
        this.result.textContent = error.message;
        return undefined;
      }
      this.#asked = wanted;
      const at = this.strip.selected;
      this.#at = direction > 0 ? this.#matches.findIndex((match) => match.start >= at) - 1 : 0;
      if (this.#at < -1) this.#at = -1;
      this.strip.found(this.#matches);
    }
    if (!this.#matches.length) {
      this.result.textContent = "not found";
      return undefined;
    }
    this.#at = (this.#at + direction + this.#matches.length) % this.#matches.length;
    this.result.textContent = `${this.#at + 1} of ${this.#matches.length}${this.#more ? "+" : ""}`;
    return this.strip.select(this.#matches[this.#at].start);
  }
}
