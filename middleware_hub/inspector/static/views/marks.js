// Small signs that several views have.

import { h } from "../lib/dom.js";
import { INEXACT, REASONS, clock, ago } from "../lib/words.js";

/** A sign for each reason. Those for which something is not exact stand out. */
export const signs = (reasons) => reasons.map((reason) => h("span", { class: `mark ${INEXACT.has(reason) ? "bad" : ""}`, title: REASONS[reason] }, reason));

/** Whether something is exact, and why it is not, or not in every way. */
export function exactness(exact, reasons = []) {
  if (exact) return h("span", { class: "marks" }, h("span", { class: "mark good" }, "exact"), signs(reasons));
  return h("span", { class: "marks" }, !reasons.some((reason) => INEXACT.has(reason)) && h("span", { class: "mark bad" }, "not exact"), signs(reasons));
}

/** That a branch leaves a reply in its middle, and how much of the reply it keeps. */
export const edited = (cut) => h("span", { class: "mark", title: "The text leaves this reply in its middle: the rest of it is in another branch." },
  `keeps ${cut.kept} of ${cut.of} tokens of ${cut.request_id || "a reply"}`);

export const when = (seconds) => h("time", { datetime: new Date(seconds * 1000).toISOString(), title: clock(seconds) }, ago(seconds));

/** Writes all ages in the page again: a list that nothing is added to stays as it is for hours. */
export function refreshAges() {
  for (const element of document.querySelectorAll("time")) element.textContent = ago(Date.parse(element.dateTime) / 1000);
}

/** Versions as "3", "3 → 5", or "3 → 5 (4 of them)". */
export function versions(all) {
  if (!all?.length) return "–";
  if (all.length === 1) return all[0];
  return `${all[0]} → ${all.at(-1)}${all.length > 2 ? ` (${all.length})` : ""}`;
}

/** What went wrong, said where the view would be. */
export const trouble = (error) => h("div", { class: "trouble", role: "alert" }, h("strong", null, "That did not work. "), error.message);
