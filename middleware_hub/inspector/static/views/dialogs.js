// Questions to the reader, and the list of keys.

import { h, labelled } from "../lib/dom.js";

function open(dialog) {
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
}

/** Asks for one line. Resolves to what was written, or null if the dialog was closed. */
export function ask({ title, label, value = "", text = "", type = "text", button = "OK", inputmode }) {
  return new Promise((resolve) => {
    const input = h("input", { type, value, autocomplete: "off", spellcheck: "false", inputmode, required: true });
    let answer = null;
    const form = h("form", {
      method: "dialog",
      onsubmit: () => {
        answer = input.value;
      },
    }, h("h2", null, title), text && h("p", { role: "alert" }, text), labelled(label, input),
    h("div", { class: "buttons" }, h("button", { type: "button", class: "plain", onclick: () => dialog.close() }, "Cancel"), h("button", { type: "submit" }, button)));
    const dialog = h("dialog", { "aria-label": title }, form);
    dialog.addEventListener("close", () => resolve(answer));
    open(dialog);
    input.select();
  });
}

const KEYS = [
  ["← →", "the previous token, the next"],
  ["↑ ↓", "the line above, below"],
  ["Home End", "the first token, the last"],
  ["n p", "the next turn, the previous"],
  ["d D", "the next drift, the previous"],
  ["c", "change what the colours show"],
  ["/", "search: Enter goes on, Shift+Enter back, Escape ends it"],
  ["g", "go to a position"],
  ["?", "this list"],
];

/** The keys of the page. */
export function help() {
  const dialog = h("dialog", { "aria-label": "Keys" },
    h("h2", null, "Keys"),
    h("dl", { class: "keys" }, KEYS.map(([keys, what]) => [h("dt", null, keys.split(" ").map((key) => [h("kbd", null, key), " "])), h("dd", null, what)])),
    h("form", { method: "dialog", class: "buttons" }, h("button", { type: "submit" }, "Close")));
  open(dialog);
}
