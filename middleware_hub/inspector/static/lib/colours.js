// What the colours of tokens mean. A colouring gives each token a class and has a legend; CSS has the colours.

import { h } from "./dom.js";
import { count, float, percent } from "./words.js";

export const STEPS = 7;
export const HUES = 6;

export const COLOURINGS = [
  ["mask", "Loss mask"],
  ["logprob", "Logprob"],
  ["version", "Weight version"],
  ["turn", "Turn"],
  ["drift", "Drift"],
];

/** The step of a logprob on a scale that percentiles clip: 0 is likely, STEPS - 1 is unlikely. */
export function step(value, range) {
  if (!(range.high > range.low)) return 0;
  const place = (range.high - value) / (range.high - range.low);
  return Math.max(0, Math.min(STEPS - 1, Math.floor(place * STEPS)));
}

/** The scale of a branch: from its 1st to its 99th percentile. */
export const scaleOf = (head) => ({ low: head.logprobs?.p01 ?? -1, high: head.logprobs?.p99 ?? 0 });

/** A function from a token to the class that colours it. Tokens that were not sampled have no colour but by turn. */
export function colouring(mode, head) {
  const range = scaleOf(head);
  if (mode === "logprob") return (token) => (token.sampled && token.logprob !== null ? `l${step(token.logprob, range)}` : "");
  if (mode === "version") return (token) => (token.sampled && token.version >= 0 ? `h${token.version % HUES}` : "");
  if (mode === "turn") return (token) => (token.turn >= 0 ? `h${token.turn % HUES}` : "");
  if (mode === "drift") return (token) => (token.drift ? "drifted" : "");
  return (token) => (token.sampled ? "sampled" : "");
}

const swatch = (of, ...text) => h("span", { class: "key" }, h("i", { class: `swatch ${of}` }), h("span", null, text));

/** What the colours mean, with their numbers. */
export function legend(mode, head) {
  const sampled = head.logprobs?.count ?? 0;
  if (mode === "logprob") {
    if (!sampled) return [h("span", null, "The engine sent no logprobs.")];
    const { low, high } = scaleOf(head);
    return [
      h("span", null, `unlikely ${float(low, 2)}`),
      h("span", { class: "ramp", "aria-hidden": "true" },
        Array.from({ length: STEPS }, (_, place) => h("i", { class: `swatch l${STEPS - 1 - place}` }))),
      h("span", null, `${float(high, 2)} likely`),
      h("span", { class: "dim" }, `percentiles 1 to 99; all: ${float(head.logprobs.min, 2)} to ${float(head.logprobs.max, 2)}`),
      swatch("plain", "not sampled"),
    ];
  }
  if (mode === "version") {
    if (!head.versions.length) return [h("span", null, "No token of this branch was sampled.")];
    const shown = head.versions.slice(0, 12);
    return [
      ...shown.map((version, place) => swatch(`h${place % HUES}`, version)),
      head.versions.length > shown.length && h("span", { class: "dim" }, `and ${head.versions.length - shown.length} more`),
      swatch("plain", "not sampled"),
    ];
  }
  if (mode === "turn") return [h("span", null, "Each turn has the colour of its number in the list of turns.")];
  if (mode === "drift") {
    if (!head.drift) return [h("span", null, "Encoding the text again, to compare …")];
    const { drifted_tokens: drifted, sampled_tokens: of, spans } = head.drift;
    if (!drifted) return [h("span", null, `None of ${count(of)} sampled tokens would change if the text was encoded again.`)];
    return [
      h("span", null, h("b", null, percent(drifted, of)), ` of the sampled tokens (${count(drifted)} of ${count(of)}, in ${count(spans)} places) change if the text is encoded again`),
      swatch("drifted", "sampled"),
      swatch("encoded", "encoded again"),
    ];
  }
  return [swatch("sampled", "sampled by the model, trained (mask 1)"), swatch("plain", "context (mask 0)")];
}
