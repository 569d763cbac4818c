// All that is known of one token, and of its neighbours in the text; or of an image.

import { h } from "../lib/dom.js";
import { spelled, utf8 } from "../lib/glyphs.js";
import { facts, held, spoken, thumbnail, tokensOf } from "../lib/images.js";
import { nameOf, turnCount } from "../lib/turns.js";
import { REASONS, count, ending, float } from "../lib/words.js";

/** One line about a token, for those who hear the page. */
export function sentence(token, head) {
  const parts = [`token ${count(token.index)} of ${count(head.total)}`, spelled(token.text, token.bytes), token.sampled ? "sampled" : "context"];
  if (token.sampled && token.logprob !== null) parts.push(`logprob ${float(token.logprob, 4)}`);
  if (token.sampled && token.version >= 0) parts.push(`version ${head.versions[token.version]}`);
  if (token.turn >= 0) parts.push(nameOf(head.turns, token.turn));
  if (token.drift) parts.push("would be encoded otherwise");
  return parts.join(", ");
}

/** The panel of a token. */
export function details(token, head, link) {
  const turn = token.turn >= 0 ? head.turns[token.turn] : null;
  const [word, wrong, meaning] = ending(turn?.finish);
  const rows = [
    ["position", `${count(token.index)} of ${count(head.total)}`],
    ["id", String(token.id)],
    ["text", h("span", { class: "value-text", dir: "auto" }, spelled(token.text, token.bytes))],
    ["bytes", token.bytes ? (token.bytes.match(/../g) ?? []).join(" ") : utf8(token.text) || "none"],
    ["loss mask", token.sampled ? "1, sampled" : "0, context"],
    ["logprob", token.sampled && token.logprob !== null ? String(token.logprob).replace("-", "−") : "–"],
    ["probability", token.sampled && token.logprob !== null ? probability(token.logprob) : "–"],
    ["version", token.sampled && token.version >= 0 ? head.versions[token.version] : "–"],
    ["place", turn ? `${nameOf(head.turns, token.turn)}${turn.sampled ? ` of ${count(turnCount(head.turns))}` : ""}` : "–"],
    ["role", turn?.role ?? "–"],
    ["in this part", turn ? `${count(token.index - turn.start + 1)} of ${count(turn.end - turn.start)}` : "–"],
    ["turn ended", word ? h("span", { class: wrong ? "mark bad" : "", title: meaning }, word) : "–"],
    ["request id", turn?.request_id ?? "–"],
    ...(turn?.reasons ?? []).map((reason, place) => [place ? "" : "remarks", [h("b", null, reason), ": ", REASONS[reason] ?? ""]]),
  ];
  if (token.special) rows.splice(3, 0, ["special", "yes"]);
  const title = h("h2", null, "Token ", count(token.index));
  return [
    h("div", { class: "details-head" }, title, h("span", { class: "spacer" }), h("a", { href: link }, "link")),
    h("dl", { class: "facts-list" }, rows.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))),
    token.drift && drift(token.drift),
  ];
}

/** One line about an image, for those who hear the page. */
export function imageSentence(image, token, head) {
  const [from, to] = image.span;
  return [spoken(image), `tokens ${count(from)} to ${count(to - 1)} of ${count(head.total)}`, "context", token.turn >= 0 && nameOf(head.turns, token.turn),
    held(image) && "Enter opens it"].filter(Boolean).join(", ");
}

/** The panel of an image. */
export function imageDetails(image, token, head, link) {
  const turn = token.turn >= 0 ? head.turns[token.turn] : null;
  const [from, to] = image.span;
  const rows = [
    ["tokens", `${count(tokensOf(image))}: ${count(from)} to ${count(to - 1)} of ${count(head.total)}`],
    ["id", `${token.id}, for each of them`],
    ["file", facts(image)],
    ["digest", h("span", { class: "id" }, image.digest)],
    ["loss mask", "0, context"],
    ["place", turn ? nameOf(head.turns, token.turn) : "–"],
    ["role", turn?.role ?? "–"],
  ];
  const number = head.images.indexOf(image) + 1;
  return [
    h("div", { class: "details-head" }, h("h2", null, `Image ${count(number)}`, h("span", { class: "dim" }, ` of ${count(head.images.length)}`)), h("span", { class: "spacer" }), h("a", { href: link }, "link")),
    h("div", { class: "large" }, thumbnail(image)),
    h("dl", { class: "facts-list" }, rows.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))),
  ];
}

function probability(logprob) {
  const value = 100 * Math.exp(logprob);
  return value >= 0.01 ? `${value.toFixed(value > 10 ? 1 : 2)}%` : `${value.toExponential(1)}%`;
}

/** Both spellings of a piece with drift, with their ids. */
function drift(span) {
  const spelling = (title, ids, texts) => h("div", null,
    h("dt", null, title),
    h("dd", null, ids.map((id, place) => h("span", { class: "spelled" }, h("bdi", null, spelled(texts[place] ?? "", null)), h("span", { class: "dim" }, ` ${id}`)))));
  return h("section", { class: "drift-details" },
    h("h3", null, "Drift"),
    h("p", null, "Encoding the same text again gives other ids. A trainer that does so trains tokens that were never sampled."),
    h("dl", { class: "facts-list" }, spelling("sampled", span.sampled, span.sampled_texts), spelling("encoded", span.encoded, span.encoded_texts)));
}
