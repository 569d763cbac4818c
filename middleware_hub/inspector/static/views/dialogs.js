// Questions to the reader, the list of keys, and images at their own size.

import { h, labelled, put } from "../lib/dom.js";
import { facts, fileOf, held } from "../lib/images.js";
import { plural } from "../lib/words.js";

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
  ["← →", "the previous token or image, the next"],
  ["↑ ↓", "the line above, below"],
  ["Home End", "the first token, the last"],
  ["n p", "the next turn, the previous"],
  ["d D", "the next drift, the previous"],
  ["c", "change what the colours show"],
  ["/", "search: Enter goes on, Shift+Enter back, Escape ends it"],
  ["g", "go to a position"],
  ["Enter", "open the image that is chosen"],
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

/** Opens an image; `span` is missing where it stands in no sequence. */
export function showImage(image) {
  const frame = h("div", { class: "opened", tabindex: 0, role: "region", "aria-label": "Image" }, h("p", { class: "dim" }, held(image) ? "Loading …" : "The file of this image is not held any more."));
  const tokens = image.span ? `Image of ${plural(image.span[1] - image.span[0], "token")}` : "Image";
  const save = h("a", { class: "button", download: `${image.digest.replace(":", "-")}.${(image.mime ?? "").replace("image/", "")}`, hidden: true }, "Save the file");
  const dialog = h("dialog", { class: "wide", "aria-label": tokens },
    h("h2", null, tokens), frame, h("p", null, facts(image), " ", h("span", { class: "id" }, image.digest)),
    h("form", { method: "dialog", class: "buttons" }, save, h("button", { type: "submit", autofocus: true }, "Close")));
  open(dialog);
  if (!held(image)) return;
  fileOf(image.digest).then((url) => {
    put(frame, h("img", { src: url, alt: `${facts(image)}`, width: image.width, height: image.height }));
    save.href = url;
    save.hidden = false;
  }, (error) => put(frame, h("p", { role: "alert" }, error.message)));
}
