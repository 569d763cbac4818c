// The text of a branch as boxes, one for each token. Only rows near the view are in the page, whatever the length.

import { colouring } from "../lib/colours.js";
import { h, put } from "../lib/dom.js";
import { Places, imageAt } from "../lib/images.js";
import { Heights, cutRows, rowOf } from "../lib/rows.js";
import { drawRow } from "./row.js";

const SPARE = 500; // pixels drawn beyond each edge
const LINE = 27; // pixels of a line of tokens, for guesses
const PICTURE = 116; // pixels of an image's box
const CHARACTER = 8.4;
const AT_ONCE = 2; // windows fetched at one time

export class Strip {
  #drawn = new Map(); // row -> its element
  #selected = -1;
  #matches = [];
  #fetching = 0;
  #wanted = [];
  #scheduled = false;
  #width = 0;
  #gone = false;

  /** `tokens` are those of the branch with this `head`; `onselect(index)` is told which one is looked at. */
  constructor({ head, tokens, mode, onselect, onopen, onerror }) {
    this.head = head;
    this.tokens = tokens;
    this.places = new Places(head.images);
    this.onselect = onselect;
    this.onopen = onopen; // is told which image is opened
    this.onerror = onerror;
    this.rows = cutRows(head.total, head.turns, head.images);
    this.inner = h("div", { class: "strip-inner" });
    this.element = h("div", { class: "strip", tabindex: 0, role: "region", "aria-label": "Tokens", "aria-describedby": "strip-help" }, this.inner);
    this.element.addEventListener("scroll", () => this.#schedule(), { passive: true });
    this.element.addEventListener("click", (event) => this.#clicked(event));
    this.watcher = new ResizeObserver(() => this.#resized());
    this.watcher.observe(this.element);
    this.mode = mode;
    this.#guess();
  }

  get selected() {
    return this.#selected;
  }

  close() {
    this.#gone = true;
    this.watcher.disconnect();
  }

  /** Colours by something else. The token at the top stays there. */
  colour(mode, head = this.head) {
    const { row, offset } = this.#anchor();
    this.mode = mode;
    this.head = head;
    this.#clear();
    this.#guess();
    this.element.scrollTop = this.heights.top(row) + offset;
    this.#draw();
  }

  /** Marks what a search found, as `{start, end}`. */
  found(matches) {
    this.#matches = matches;
    this.#clear();
    this.#draw();
  }

  /** The image that is looked at, or null. */
  get image() {
    return this.#selected < 0 ? null : imageAt(this.head.images, this.#selected);
  }

  /** Looks at the next token or image, or with -1 at the previous one. */
  step(direction) {
    const at = this.#selected;
    return this.select(at < 0 ? 0 : this.#beside(at, direction));
  }

  #beside(index, direction) {
    return this.places.token(this.places.of(index) + direction);
  }

  /** Looks at a token, and brings it into view: where it is, or to a third of the height if it is far. */
  async select(index, { centre = false } = {}) {
    const token = Math.max(0, Math.min(index, this.head.total - 1));
    const wanted = imageAt(this.head.images, token)?.span[0] ?? token;
    this.#mark(this.#selected, false);
    this.#selected = wanted;
    const row = rowOf(this.rows, wanted);
    try {
      await this.tokens.fetch(wanted);
    } catch (error) {
      this.onerror(error);
      return;
    }
    if (this.#gone || this.#selected !== wanted) return;
    if (!this.#drawn.size) this.#resized(); // the tokens came before the first frame: there is nothing to scroll yet
    if (!this.#drawn.has(row) || !this.#box(wanted)) {
      this.element.scrollTop = this.heights.top(row) - this.element.clientHeight / 3;
      this.#draw();
    }
    this.#reveal(wanted, centre);
    this.#mark(wanted, true);
    this.onselect(wanted);
  }

  /** Looks at the nearest token on the line above (-1) or below (1). */
  line(direction) {
    const box = this.#box(this.#selected);
    if (!box) return;
    const from = box.getBoundingClientRect();
    const middle = (from.left + from.right) / 2;
    let best = null;
    for (let index = this.#beside(this.#selected, direction); index >= 0 && index < this.head.total; index = this.#beside(index, direction)) {
      const next = this.#box(index)?.getBoundingClientRect();
      if (!next) break;
      const away = direction > 0 ? next.top >= from.bottom - 6 : next.bottom <= from.top + 6;
      if (!away) continue;
      if (best && Math.abs(next.top - best.top) > 6) break;
      const distance = Math.abs((next.left + next.right) / 2 - middle);
      if (!best || distance < best.distance) best = { index, distance, top: next.top };
    }
    this.select(best ? best.index : this.#beside(this.#selected, direction));
  }

  #clicked(event) {
    const box = event.target.closest("[data-i]");
    if (!box) return;
    this.select(Number(box.dataset.i));
    if (box.matches(".picture")) this.onopen(imageAt(this.head.images, Number(box.dataset.i)));
  }

  #box(index) {
    const row = this.#drawn.get(rowOf(this.rows, index));
    return row?.querySelector(`[data-i="${index}"]`) ?? null;
  }

  #mark(index, on) {
    const box = index >= 0 ? this.#box(index) : null;
    box?.classList.toggle("on", on);
    if (on) box?.setAttribute("aria-current", "true");
    else box?.removeAttribute("aria-current");
  }

  #reveal(index, centre) {
    const box = this.#box(index);
    if (!box) return;
    const [view, at] = [this.element.getBoundingClientRect(), box.getBoundingClientRect()];
    const hidden = at.top < view.top + 8 || at.bottom > view.bottom - 8;
    if (!hidden && !centre) return;
    const far = centre || at.top < view.top - view.height / 2 || at.bottom > view.bottom + view.height / 2;
    if (far) this.element.scrollTop += at.top - view.top - view.height / 3;
    else this.element.scrollTop += at.top < view.top + 8 ? at.top - view.top - 40 : at.bottom - view.bottom + 40;
    this.#draw();
  }

  #guess() {
    this.#width = this.inner.clientWidth || 700;
    const each = Math.max(1, this.head.chars / Math.max(1, this.head.total)) * CHARACTER + 6;
    const line = this.mode === "drift" ? LINE * 1.3 : LINE;
    const lines = (row) => (row.image ? PICTURE : Math.ceil(((row.end - row.start) * each) / Math.max(200, this.#width - 80)) * line);
    const height = (row) => lines(row) + (row.first ? 34 : 4);
    this.heights = new Heights(this.rows.map(height));
    this.classOf = colouring(this.mode, this.head);
  }

  #anchor() {
    const row = this.heights.at(this.element.scrollTop);
    return { row, offset: this.element.scrollTop - this.heights.top(row) };
  }

  #resized() {
    if (this.#gone || Math.abs(this.inner.clientWidth - this.#width) < 2) return this.#draw();
    return this.colour(this.mode);
  }

  #clear() {
    for (const element of this.#drawn.values()) element.remove();
    this.#drawn.clear();
  }

  #schedule() {
    if (this.#scheduled) return;
    this.#scheduled = true;
    requestAnimationFrame(() => {
      this.#scheduled = false;
      this.#draw();
    });
  }

  /** Draws the rows near the view. What they measure may move others into it: then again. */
  #draw() {
    if (this.#gone || !this.rows.length || !this.element.clientHeight) return;
    for (let again = true, round = 0; again && round < 4; round += 1) again = this.#drawOnce();
    this.inner.style.setProperty("height", `${this.heights.top(this.rows.length)}px`);
    this.#fetch();
  }

  #drawOnce() {
    const anchor = this.#anchor();
    const top = this.element.scrollTop;
    const first = this.heights.at(top - SPARE);
    const last = this.heights.at(top + this.element.clientHeight + SPARE);
    for (const [row, element] of this.#drawn) {
      if (row >= first && row <= last && !(element.waiting && this.#here(row))) continue;
      element.remove();
      this.#drawn.delete(row);
    }
    const fresh = [];
    this.#wanted = [];
    let below = null; // rows stand in the page in their order, whichever came first: so they are read, and tabbed through
    for (let row = last; row >= first; row -= 1) {
      const here = this.#here(row);
      if (!here) this.#wanted.unshift(row);
      if (this.#drawn.has(row)) {
        below = this.#drawn.get(row);
        continue;
      }
      const element = drawRow(this, row, here);
      element.waiting = !here;
      if (element.waiting) element.style.setProperty("height", `${this.heights.height(row)}px`);
      this.#drawn.set(row, element);
      this.inner.insertBefore(element, below);
      below = element;
      fresh.push(row);
    }
    if (!fresh.length) return false;
    const sizes = fresh.map((row) => this.#drawn.get(row).offsetHeight); // read all before anything is written
    let moved = false;
    fresh.forEach((row, place) => {
      if (!this.#drawn.get(row).waiting) moved = this.heights.measured(row, sizes[place]) || moved;
    });
    for (const [row, element] of this.#drawn) element.style.setProperty("transform", `translateY(${this.heights.top(row)}px)`);
    if (moved) {
      this.inner.style.setProperty("height", `${this.heights.top(this.rows.length)}px`);
      const wanted = this.heights.top(anchor.row) + anchor.offset;
      if (Math.abs(wanted - this.element.scrollTop) > 1) this.element.scrollTop = wanted;
    }
    return moved;
  }

  /** Whether all of a row can be drawn: it may lie in two windows, and an image needs none. */
  #here(row) {
    const { start, end, image } = this.rows[row];
    return Boolean(image || (this.tokens.at(start) && this.tokens.at(end - 1)));
  }

  #fetch() {
    while (this.#fetching < AT_ONCE && this.#wanted.length) {
      const { start, end } = this.rows[this.#wanted.shift()];
      const index = this.tokens.at(start) ? end - 1 : start;
      if (this.tokens.at(index)) continue;
      this.#fetching += 1;
      this.tokens.fetch(index).then(
        () => this.#arrived(),
        (error) => {
          this.#fetching -= 1;
          this.onerror(error);
        },
      );
    }
  }

  #arrived() {
    this.#fetching -= 1;
    this.#schedule();
  }

  /** The classes of a token's box. */
  classes(token) {
    const found = this.#matches.some((match) => match.start <= token.index && token.index < match.end);
    const names = ["t", token.sampled ? "s" : "c", this.classOf(token)];
    if (token.special) names.push("special");
    if (found) names.push("found");
    if (token.index === this.#selected) names.push("on");
    return names.filter(Boolean).join(" ");
  }

  /** Says that nothing is here. */
  empty(...what) {
    put(this.inner, h("p", { class: "empty" }, what));
  }
}
