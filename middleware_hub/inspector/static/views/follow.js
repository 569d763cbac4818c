// Follows a conversation that goes on: shows each new turn behind the branch that is open.

import { h, put } from "../lib/dom.js";
import { pathOf, source } from "../lib/source.js";
import { trouble } from "./marks.js";

const POLL = 2000; // ms

/** The newest branch that goes on from the end of a branch; the branch itself if none does, or if it is gone. */
export function continued(before, after, branch) {
  const end = before.tree.findLast((node) => node.branch_of?.includes(branch));
  const passing = new Set(after.tree.find((node) => node.id === end?.id)?.branch_of ?? []);
  const found = after.branches_list.filter((one) => passing.has(one.id) && one.id !== branch);
  return found.reduce((best, one) => (best && best.updated >= one.updated ? best : one), null)?.id ?? branch;
}

export class Follow {
  #timer = 0;
  #closed = false;

  /** `place(branch)` returns the address of another branch; `onchange` hears of the box. */
  constructor(whole, branch, on, place, onchange) {
    this.whole = whole;
    this.branch = branch;
    this.place = place;
    this.error = h("span");
    this.box = h("input", { type: "checkbox", checked: on, onchange: () => this.#changed(onchange) });
    this.element = h("div", null, h("label", { class: "follow" }, this.box, "Follow new turns"), this.error);
    if (on) this.#wait();
  }

  close() {
    this.#closed = true;
    clearTimeout(this.#timer);
  }

  get on() {
    return this.box.checked;
  }

  #changed(onchange) {
    clearTimeout(this.#timer);
    put(this.error);
    onchange();
    if (this.on) this.#look();
  }

  #wait() {
    this.#timer = setTimeout(() => this.#look(), POLL);
  }

  async #look() {
    try {
      if (document.visibilityState === "visible") {
        const fresh = await source.get(pathOf(this.whole.id));
        if (this.#closed || !this.on) return;
        put(this.error);
        const branch = continued(this.whole, fresh, this.branch);
        if (branch !== this.branch) {
          location.replace(this.place(branch));
          return;
        }
      }
    } catch (error) {
      if (this.#closed) return;
      put(this.error, " ", trouble(error));
    }
    this.#wait();
  }
}
