// Saving a branch: as a page for a colleague, as JSON, as Parquet.

import { h, put } from "../lib/dom.js";
import { source } from "../lib/source.js";

const FORMATS = [
  ["html", "Page to send to a colleague (.html)"],
  ["json", "JSON"],
  ["parquet", "Parquet"],
];

export class Downloads {
  constructor(path, head, whole) {
    this.path = path;
    this.name = whole.id.replace(/[^A-Za-z0-9._-]+/g, "-").slice(0, 80);
    this.said = h("span", { role: "status", class: "dim" });
    const button = h("summary", { class: "button" }, "Save");
    this.element = source.saved ? null : h("details", {
      class: "menu",
      onkeydown: (event) => {
        if (event.key !== "Escape" || !this.element.open) return;
        this.element.open = false;
        button.focus();
      },
      onfocusout: (event) => {
        if (event.relatedTarget && !this.element.contains(event.relatedTarget)) this.element.open = false;
      },
    }, button, h("div", { class: "menu-list" }, FORMATS.map(([format, text]) => h("button", { type: "button", class: "plain", onclick: () => this.#save(format) }, text)), this.said));
  }

  async #save(format) {
    this.said.textContent = "saving …";
    try {
      const blob = await source.blob(`${this.path}/download?format=${format}`);
      const url = URL.createObjectURL(blob);
      const link = h("a", { href: url, download: `${this.name}.${format}` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
      put(this.said, "");
      this.element.open = false;
    } catch (error) {
      put(this.said, error.message);
    }
  }
}
