// How the text of one token is drawn: what has no shape of its own gets one. What can be copied stays the text itself.

import { h } from "./dom.js";

const NAMES = {
  0x09: "⇥", 0x0a: "↵", 0x0d: "␍", 0x7f: "␡", 0xa0: "⍽", 0xad: "SHY", 0x200b: "ZWSP", 0x200c: "ZWNJ", 0x200d: "ZWJ", 0x200e: "LRM",
  0x200f: "RLM", 0x2028: "LS", 0x2029: "PS", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF", 0x202d: "LRO", 0x202e: "RLO",
  0x2060: "WJ", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI", 0xfeff: "BOM", 0x3000: "□", 0xfffd: "�",
};
// eslint-disable-next-line no-control-regex
const HIDDEN = /[\u0000-\u0020\u007f-\u00a0\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\u3000\ufeff]/;

function sign(code) {
  if (NAMES[code]) return NAMES[code];
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** The nodes for a token's text; `bytes` is hexadecimal, of a token that is no whole characters. */
export function drawn(text, bytes) {
  if (bytes !== null && bytes !== undefined) {
    const pairs = bytes.match(/../g) ?? [];
    return [h("span", { class: "bytes" }, pairs.join(" ")), text ? h("span", { class: "completes" }, text) : null];
  }
  if (text === "") return [h("span", { class: "nothing" }, "∅")];
  if (!HIDDEN.test(text)) return [text];
  const nodes = [];
  let plain = "";
  const flush = () => {
    if (plain) nodes.push(plain);
    plain = "";
  };
  for (const character of text) {
    if (!HIDDEN.test(character)) {
      plain += character;
      continue;
    }
    flush();
    if (character === " ") nodes.push(h("span", { class: "space" }, " "));
    else nodes.push(h("span", { class: "sign" }, sign(character.codePointAt(0))));
  }
  flush();
  return nodes;
}

/** The same as one string, for lists and for what is read aloud. */
export function spelled(text, bytes) {
  if (bytes !== null && bytes !== undefined) return `bytes ${(bytes.match(/../g) ?? []).join(" ")}`;
  if (text === "") return "no text";
  let out = "";
  for (const character of text) out += HIDDEN.test(character) && character !== " " ? sign(character.codePointAt(0)) : character;
  return `“${out}”`;
}

/** UTF-8 of a text, as pairs of hexadecimal digits. */
export function utf8(text) {
  return Array.from(new TextEncoder().encode(text), (byte) => byte.toString(16).padStart(2, "0")).join(" ");
}
