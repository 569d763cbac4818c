// One row of tokens: the head of its turn if it begins one, its position, and a box for each token, or for an image.

import { h } from "../lib/dom.js";
import { drawn } from "../lib/glyphs.js";
import { facts, named, spoken, thumbnail, tokensOf } from "../lib/images.js";
import { numbers, sampledOf } from "../lib/turns.js";
import { count, ending, percent, plural } from "../lib/words.js";
import { signs } from "./marks.js";

/** The element of a row of a strip; without tokens if they are not `here` yet. */
export function drawRow(strip, number, here) {
  const row = strip.rows[number];
  const boxes = h("div", { class: "boxes" });
  if (row.image) boxes.append(picture(strip, row.image));
  else if (here) drawBoxes(strip, row, boxes);
  else boxes.classList.add("waits");
  return h("div", { class: `row ${row.first ? "first" : ""}` },
    row.first && row.turn >= 0 && turnHead(strip.head, row.turn),
    h("div", { class: "gutter", "aria-hidden": "true" }, count(row.start)),
    boxes);
}

function turnHead(head, number) {
  const turn = head.turns[number];
  const [word, wrong, meaning] = ending(turn.finish);
  const images = (head.images ?? []).reduce((sum, { span: [from] }) => sum + Number(turn.start <= from && from < turn.end), 0);
  return h("div", { class: "turn-head" },
    turn.sampled && h("b", null, `Turn ${numbers(head.turns)[number]}`),
    h("span", null, turn.role),
    h("span", { class: "dim" }, plural(turn.end - turn.start, "token")),
    images > 0 && h("span", { class: "dim" }, plural(images, "image")),
    turn.sampled && turn.version !== null && turn.version !== undefined && h("span", { class: "dim" }, `version ${turn.version}`),
    word && h("span", { class: wrong ? "mark bad" : "dim", title: meaning }, word),
    signs(turn.reasons ?? []),
    turn.drifted > 0 && h("span", { class: "mark drift" }, `${percent(turn.drifted, sampledOf(turn))} drift`));
}

function drawBoxes(strip, row, boxes) {
  const inDrift = strip.mode === "drift";
  for (let index = row.start; index < row.end; ) {
    const token = strip.tokens.token(index);
    if (inDrift && token.drift) {
      const end = Math.min(token.drift.end, row.end);
      const breaks = token.drift.text.includes("\n");
      boxes.append(pair(strip, token.drift, index, end));
      if (breaks) boxes.append(h("br"));
      index = end;
      continue;
    }
    boxes.append(box(strip, token));
    if (token.text.includes("\n")) boxes.append(h("br"));
    index += 1;
  }
}

/** The box of an image, whose tokens are all the same. It opens the image. */
function picture(strip, image) {
  const on = strip.selected === image.span[0];
  return h("button", { type: "button", class: `picture ${on ? "on" : ""}`, "data-i": image.span[0], "aria-current": on ? "true" : null, "aria-label": `Open ${spoken(image)}` },
    thumbnail(image),
    h("span", { class: "picture-facts" },
      h("b", null, plural(tokensOf(image), "token")), h("span", null, facts(image)), h("span", { class: "id" }, named(image.digest))));
}

/** A box of one token. Its text is isolated, so that right-to-left text does not reorder its neighbours. */
export function box(strip, token) {
  const on = strip.selected === token.index;
  return h("span", { class: strip.classes(token), dir: "auto", "data-i": token.index, "aria-current": on ? "true" : null },
    drawn(token.text, token.bytes));
}

/** Both spellings of a piece of text: what was sampled above, what its text would be encoded to below. */
function pair(strip, span, from, to) {
  const sampled = [];
  for (let index = from; index < to; index += 1) sampled.push(box(strip, strip.tokens.token(index)));
  const encoded = from === span.start
    ? span.encoded.map((id, place) => h("span", { class: "t encoded", dir: "auto", title: `id ${id}` }, drawn(span.encoded_texts[place] ?? "", null)))
    : [];
  return h("span", { class: "pair" },
    h("span", { class: "spelling" }, sampled),
    h("span", { class: "spelling" }, h("span", { class: "hidden" }, " encoded again: "), encoded));
}
