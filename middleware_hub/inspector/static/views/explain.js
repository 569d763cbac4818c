// A text as a workflow has it: how much of it is remembered, where it leaves the record, and what to do.

import { h, labelled, put } from "../lib/dom.js";
import { drawn } from "../lib/glyphs.js";
import { source } from "../lib/source.js";
import { REASONS, count, percent, plural } from "../lib/words.js";
import { exactness, trouble } from "./marks.js";

export function explain(main) {
  const text = h("textarea", { rows: 10, spellcheck: "false", dir: "auto", required: true });
  const namespace = h("input", { autocomplete: "off", spellcheck: "false", placeholder: "none" });
  const adapter = h("input", { autocomplete: "off", spellcheck: "false", placeholder: "none" });
  const images = h("input", { autocomplete: "off", spellcheck: "false", placeholder: "none" });
  const result = h("section", { class: "explained", "aria-live": "polite", "aria-label": "Answer" });
  const form = h("form", {
    class: "explain",
    onsubmit: async (event) => {
      event.preventDefault();
      put(result, h("p", { class: "dim" }, "Looking it up …"));
      try {
        put(result, answer(text.value, await source.post("/explain", { text: text.value, namespace: namespace.value, adapter: adapter.value, image_data: images.value.split(/[\s,]+/).filter(Boolean) })));
      } catch (error) {
        put(result, trouble(error));
      }
    },
  }, labelled("The text, exactly as the workflow has it", text),
  h("div", { class: "bar" }, labelled("Namespace", namespace), labelled("Adapter", adapter), labelled("Images: their digests, in order", images), h("button", { type: "submit" }, "Explain")));
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  put(main,
    h("header", { class: "head" }, h("h1", null, "Why is a text not exact?"),
      h("p", { class: "dim" }, "Paste a text that came back inexact, or that was encoded again. The answer says how much of it is remembered, and where it leaves the record.")),
    form, result);
  return {};
}

function answer(text, found) {
  const matched = found.matched_chars;
  const whole = found.text_length ?? text.length;
  return [
    h("h2", null, exactness(found.exact, found.reasons), " ", headline(matched, whole)),
    h("div", { class: "meter", role: "img", "aria-label": `${percent(matched, whole)} of the text is remembered` },
      h("i", { style: { width: `${whole ? (100 * matched) / whole : 0}%` } })),
    h("p", null, h("b", { "data-fact": "matched" }, count(matched)), ` of ${count(whole)} characters are remembered (${percent(matched, whole)}), with `,
      `${plural(found.replies_matched ?? 0, "reply", "replies")} on the way`, found.tokens !== undefined && `; ${plural(found.tokens, "token")} of it are taken from the record`, "."),
    found.message && h("p", { class: "message", "data-fact": "message" }, found.message),
    found.text && found.recorded && sides(found),
    found.other_recorded?.length ? h("section", null, h("h3", null, "Other recorded ways to go on from there"),
      h("ul", null, found.other_recorded.map((one) => h("li", null, visible(typeof one === "string" ? one : one.after ?? JSON.stringify(one)))))) : null,
    found.advice?.length ? h("section", null, h("h3", null, "What to do"), h("dl", { class: "advice" },
      found.advice.map((one) => [h("dt", null, one.reason), h("dd", null, one.what, one.do && h("p", null, one.do))])))
      : found.reasons?.length ? h("ul", null, found.reasons.map((reason) => h("li", null, h("b", null, reason), ": ", REASONS[reason] ?? ""))) : null,
  ];
}

function headline(matched, whole) {
  if (matched >= whole && whole > 0) return "all of it is remembered";
  return matched ? "a part of it is remembered" : "none of it is remembered";
}

/** The text and the record around the place where they part, one above the other. */
function sides({ text, recorded }) {
  const side = (title, of) => h("tr", null, h("th", { scope: "row" }, title),
    h("td", { class: "before" }, visible(of.before)), h("td", { class: "after" }, visible(of.after)));
  return h("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": "Where they part" }, h("table", { class: "sides" },
    h("caption", { class: "hidden" }, "Where the text leaves the record"),
    h("thead", null, h("tr", null, h("td"), h("th", { scope: "col" }, "the same"), h("th", { scope: "col" }, "different"))),
    h("tbody", null, side("the text", text), side("recorded", recorded))));
}

const visible = (text) => h("span", { class: "piece", dir: "auto" }, text ? drawn(text, null) : h("span", { class: "dim" }, "(nothing)"));
