// A long list of lines of one height: only those in view are in the page.

import { h, put } from "./dom.js";

const SPARE = 8; // lines beyond each edge

/** A list of `count` lines of `height` pixels; `draw(number)` makes one. */
export class LongList {
  constructor({ label, height, draw }) {
    this.height = height;
    this.draw = draw;
    this.count = 0;
    this.inner = h("ol", { class: "long-inner" });
    this.element = h("div", { class: "long", role: "region", "aria-label": label, tabindex: 0 }, this.inner);
    this.element.addEventListener("scroll", () => this.#draw(), { passive: true });
    new ResizeObserver(() => this.#draw()).observe(this.element);
  }

  /** Draws all that is in view again, of so many lines. */
  show(count) {
    this.count = count;
    this.inner.style.setProperty("height", `${count * this.height}px`);
    this.first = -1;
    this.#draw();
  }

  reveal(number) {
    const top = number * this.height;
    const view = this.element;
    if (top < view.scrollTop) view.scrollTop = top;
    else if (top + this.height > view.scrollTop + view.clientHeight) view.scrollTop = top + this.height - view.clientHeight;
  }

  #draw() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.height) - SPARE);
    const last = Math.min(this.count, Math.ceil((this.element.scrollTop + this.element.clientHeight) / this.height) + SPARE);
    if (first === this.first && last === this.last) return;
    [this.first, this.last] = [first, last];
    const focused = this.inner.contains(document.activeElement) ? document.activeElement.closest("li")?.getAttribute("aria-posinset") : null;
    put(this.inner, Array.from({ length: Math.max(0, last - first) }, (_, place) => {
      const number = first + place;
      return h("li", { "aria-setsize": this.count, "aria-posinset": number + 1, style: { top: `${number * this.height}px`, height: `${this.height}px` } }, this.draw(number));
    }));
    if (focused) this.inner.querySelector(`[aria-posinset="${focused}"] :is(button, a)`)?.focus({ preventScroll: true });
  }
}
