// What an engineer looks for first in a branch: why it is not exact, turns that were cut off, the turn with most drift, new weights.

import { h } from "../lib/dom.js";
import { nameOf, sampledOf } from "../lib/turns.js";
import { INEXACT, REASONS, ending, float, percent, plural } from "../lib/words.js";

/** `[{turn, text, grave}]`, the gravest first; `turn` is the place of a part. */
export function findings(head) {
  const found = [];
  const turns = head.turns.map((turn, number) => ({ ...turn, number, name: nameOf(head.turns, number) }));
  const remarks = head.reasons.map((reason) => ({ reason, those: turns.filter((turn) => turn.reasons?.includes(reason)) })).filter(({ those }) => those.length)
    .map(({ reason, those: [first, ...others] }) => ({ turn: first.number, grave: INEXACT.has(reason),
      text: `${reason} in ${others.length ? `${others.length + 1} places, first in ` : ""}${first.name}: ${REASONS[reason] ?? "see the list of reasons"}` }));
  found.push(...remarks.filter(({ grave }) => grave));
  const ended = Map.groupBy ? Map.groupBy(turns, (turn) => turn.finish) : grouped(turns);
  for (const [finish, those] of ended) {
    const [word, wrong] = ending(finish);
    if (wrong) found.push({ turn: those[0].number, text: those.length === 1 ? `${those[0].name} was ${word}` : `${plural(those.length, "turn")} ${word}, first ${those[0].name}`, grave: true });
  }
  const drifted = turns.filter((turn) => turn.drifted > 0);
  if (drifted.length) {
    const share = (turn) => turn.drifted / Math.max(1, sampledOf(turn));
    const worst = drifted.reduce((best, turn) => (share(turn) > share(best) ? turn : best));
    found.push({ turn: worst.number, text: `drift in ${plural(drifted.length, "turn")}, most in ${worst.name}: ${percent(worst.drifted, sampledOf(worst))}`, drift: true });
  }
  const sampled = turns.filter((turn) => turn.sampled);
  const changed = sampled.find((turn, place) => place && turn.version !== sampled[place - 1].version);
  if (changed) {
    const before = sampled[sampled.indexOf(changed) - 1].version;
    found.push({ turn: changed.number, text: `new weights in ${changed.name}: ${before ?? "?"} → ${changed.version ?? "?"}` });
  }
  const scored = sampled.filter((turn) => typeof turn.logprob === "number");
  if (scored.length > 1) {
    const least = scored.reduce((best, turn) => (turn.logprob < best.logprob ? turn : best));
    found.push({ turn: least.number, text: `least likely: ${least.name}, mean logprob ${float(least.logprob, 2)}` });
  }
  return [...found, ...remarks.filter(({ grave }) => !grave)];
}

function grouped(turns) {
  const groups = new Map();
  for (const turn of turns) groups.set(turn.finish, [...(groups.get(turn.finish) ?? []), turn]);
  return groups;
}

/** The findings as buttons that go there. */
export function findingsBar(head, goTo) {
  const found = findings(head);
  if (!found.length) return null;
  return h("div", { class: "findings", role: "group", "aria-label": "What stands out" },
    found.map(({ turn, text, grave, drift }) => h("button", {
      type: "button", class: grave ? "bad" : drift ? "drift" : "", onclick: () => goTo(head.turns[turn].start, drift),
    }, text)));
}
