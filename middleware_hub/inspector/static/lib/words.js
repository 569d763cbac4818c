// How numbers, times and reasons are written.

const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** 12,345 */
export const count = (value) => (value === null || value === undefined ? "–" : whole.format(value));

/** 12.3K, for where there is no room. */
export const short = (value) => (value < 10_000 ? whole.format(value) : compact.format(value));

/** "640 bytes", "12 KB", "3.4 MB" */
export function bytes(size) {
  if (size < 1000) return plural(size, "byte");
  const [value, unit] = size < 999_500 ? [size / 1e3, "KB"] : size < 999_500_000 ? [size / 1e6, "MB"] : [size / 1e9, "GB"];
  return `${value < 9.95 ? value.toFixed(1) : Math.round(value)} ${unit}`;
}

/** Text of others within a line of ours, where no element can be: its direction, and marks of directions in it, end with it. */
export const isolated = (text) => `\u2068${text}\u2069`;

/** "1 turn", "2 turns" */
export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

/** A share as per cent: no share is shown as none, and none as some. */
export function percent(part, of) {
  if (!of) return "–";
  const share = (100 * part) / of;
  if (share > 0 && share < 0.1) return "<0.1%";
  if (share < 100 && share > 99.9) return ">99.9%";
  return `${share < 10 && share > 0 ? share.toFixed(1) : Math.round(share)}%`;
}

/** A logprob or another float, with enough places to tell it from its neighbours. */
export const float = (value, places = 3) => (value === null || value === undefined ? "–" : signed(value.toFixed(places)));
const signed = (text) => (Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−"));

/** "12 s ago", and what a clock showed in the title. */
export function ago(seconds, now = Date.now() / 1000) {
  const gone = Math.max(0, now - seconds);
  if (gone < 60) return `${Math.round(gone)} s ago`;
  if (gone < 3600) return `${Math.round(gone / 60)} min ago`;
  if (gone < 86_400) return `${Math.round(gone / 3600)} h ago`;
  return new Date(seconds * 1000).toISOString().slice(0, 10);
}

/** 2026-11-22 16:25:01 */
export function clock(seconds) {
  const date = new Date(seconds * 1000);
  const two = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} `
    + `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** What a reason means, in one line: that something is not exact, or a remark about it. */
export const REASONS = {
  engine_mismatch: "the engine's ids, here or before, do not spell their text",
  template_mismatch: "a context is not what the chat template renders",
  unknown_parent: "a request named a parent that is not known",
  unknown_reply: "a reply was lost, or one that its caller lists is not in it",
  store_unreachable: "the store could not be asked, and may know more",
  media_missing: "the file of an image is not held any more",
  retokenized: "a part was encoded again from its text",
  cut_in_token: "the text was cut inside a sampled token",
  split_character: "a character of several tokens was cut",
  version_uncertain: "the weights changed while it was sampled",
  no_logprobs: "the engine sent no logprobs",
  edited_turn: "a sampled turn was edited",
  rewritten_turn: "a sampled turn was written anew",
  prefix_changed: "a sampled reply stands behind other messages now",
  left_out: "the token that a turn stopped with was left out",
  setting: "tools or options differ from those of the turn before",
  rewritten: "the conversation was rendered again",
  rendered_whole: "the whole conversation was rendered, not only what is new",
  template_error: "the template refuses what is new by itself, so the whole was rendered again",
  spliced: "rendered again, and earlier turns kept their ids",
  divergence: "not all earlier turns kept their ids: text between them has changed",
  scaffold: "not all earlier turns kept their ids: the template opens one in an unknown way",
  sentinel_collision: "not all earlier turns kept their ids: the template drops or repeats one",
  unfaithful: "not all earlier turns kept their ids: those of one may not spell its text",
  system_in_place: "a system message is written as the user's",
  arguments_text: "arguments that are no JSON object are written as text",
  media_orientation: "an image is not stored upright, and engines differ in whether they turn it",
};

/** Reasons for which something is not exact. With the others alone it is. */
export const INEXACT = new Set(["engine_mismatch", "template_mismatch", "unknown_parent", "unknown_reply", "store_unreachable", "media_missing", "retokenized"]);

/** How a generation ended: [word, whether something is wrong with it, what it means]. */
export function ending(finish) {
  if (!finish) return ["", false, ""];
  if (finish === "length") return ["cut off", true, "ended by max_new_tokens or by the context length, not by the model"];
  if (finish.startsWith("abort")) return ["aborted", true, "ended by an abort"];
  if (finish === "stop" || finish === "tool_calls" || finish === "end_turn") return [finish, false, "the model ended it"];
  return [finish, false, ""];
}
