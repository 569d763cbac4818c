// Where the answers come from: the router's API, or the data in a saved page.

import { lastUpTo } from "./rows.js";

const KEY = "tito-inspector-key";
const WINDOW = 5000; // the most tokens that one answer has

/** An answer that is no success. `status` is 0 if there was none. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The path of a conversation or of one of its branches. */
export function pathOf(conversation, branch) {
  const path = `/conversations/${encodeURIComponent(conversation)}`;
  return branch === undefined ? path : `${path}/branches/${encodeURIComponent(branch)}`;
}

/** `?a=1&b=2` of what is not empty. */
export function query(fields) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(fields)) {
    if (value !== undefined && value !== null && value !== "") search.set(name, value);
  }
  const text = search.toString();
  return text ? `?${text}` : "";
}

/** The router's API. `askForKey()` resolves to a key when the router wants one. */
class Live {
  saved = false;
  #api = new URL("../../api", import.meta.url).href;
  #media = new URL("../../../media/", import.meta.url).href;

  constructor() {
    this.askForKey = async () => null;
  }

  get key() {
    return sessionStorage.getItem(KEY);
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  }

  /** The answer's JSON; null for 204. Throws ApiError. */
  async get(path, options) {
    const response = await this.#ask(this.#api + path, options);
    return response.status === 204 ? null : response.json();
  }

  async post(path, body, options) {
    const content = JSON.stringify(body);
    const headers = { "content-type": "application/json", ...options?.headers };
    return (await this.#ask(this.#api + path, { ...options, method: "POST", body: content, headers })).json();
  }

  /** The answer's bytes, to be saved: links cannot carry a key. */
  async blob(path) {
    return (await this.#ask(this.#api + path)).blob();
  }

  /** The file of an image as a `data:` URL: an address cannot carry a key, and the page's policy allows no other. */
  async picture(digest) {
    const file = await (await this.#ask(this.#media + digest)).blob();
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(new ApiError(0, "The image cannot be read."));
      reader.readAsDataURL(file);
    });
  }

  async #ask(url, options = {}) {
    for (;;) {
      const key = this.key;
      const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
      let response;
      try {
        response = await fetch(url, { ...options, headers });
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError(0, "The router does not answer. Is it still running?");
      }
      if (response.ok) return response;
      const said = await response.json().then((body) => body?.error?.message, () => null);
      if (response.status !== 401) throw new ApiError(response.status, said ?? `the router answered ${response.status}`);
      if (this.key === key) this.key = null;
      if (!this.key) await this.#askOnce(key ? "This key is not valid." : "");
    }
  }

  /** Asks for a key, once for all that wait for one. Throws ApiError if there is none. */
  async #askOnce(text) {
    this.asking ??= this.askForKey(text).finally(() => {
      this.asking = null;
    });
    const key = await this.asking;
    if (!key) throw new ApiError(401, "This router needs a key. Load the page again to give one.");
    this.key = key;
  }
}

/** The answers that a saved page holds: the same paths, cut and searched here. */
class Saved {
  saved = true;
  key = null;

  constructor(data) {
    this.answers = data.answers;
    this.at = data.at;
  }

  async get(path) {
    const [place, search] = path.split("?");
    const parts = place.split("/").map(decodeURIComponent);
    const fields = new URLSearchParams(search);
    const last = parts.length === 6 ? parts.at(-1) : ""; // a branch may be called "tokens"
    if (last === "find") return this.#find(parts.slice(0, -1).join("/"), fields);
    const answer = this.answers[parts.join("/")];
    if (answer === undefined) throw new ApiError(404, "This saved page does not hold that.");
    return last === "tokens" ? cut(answer, Number(fields.get("start")), Number(fields.get("end"))) : answer;
  }

  post() {
    throw new ApiError(404, "A saved page cannot ask the router.");
  }

  async picture(digest) {
    const found = this.answers[`/media/${digest}`];
    if (found === undefined) throw new ApiError(404, "This saved page does not hold that image.");
    return found;
  }

  /** The paths of the conversations in it, as `[conversation, branch]`. */
  get branches() {
    const found = [];
    for (const path of Object.keys(this.answers)) {
      const match = /^\/conversations\/(.+)\/branches\/(.+)\/tokens$/s.exec(path);
      if (match) found.push([match[1], match[2]]);
    }
    return found;
  }

  #find(folder, fields) {
    const answer = this.answers[`${folder}/tokens`];
    const limit = Number(fields.get("limit") ?? 100);
    const from = Number(fields.get("from") ?? 0);
    const ids = fields.get("token_ids");
    const found = ids ? findIds(answer.ids, ids.split(",").map(Number), from, limit + 1)
      : findText(answer.texts, fields.get("text") ?? "", from, limit + 1);
    return { matches: found.slice(0, limit), more: found.length > limit };
  }
}

function cut(answer, start, end) {
  const last = Math.min(end, answer.total);
  const part = { start, end: last, total: answer.total, bytes: {}, special: [], drift: [] };
  for (const name of ["ids", "texts", "mask", "logprobs", "versions", "turns"]) part[name] = answer[name].slice(start, last);
  for (const [offset, bytes] of Object.entries(answer.bytes ?? {})) if (offset >= start && offset < last) part.bytes[offset] = bytes;
  part.special = (answer.special ?? []).filter((offset) => offset >= start && offset < last);
  part.drift = (answer.drift ?? []).filter((span) => span.start < last && span.end > start);
  return part;
}

function findIds(all, wanted, from, limit) {
  const found = [];
  for (let at = from; at + wanted.length <= all.length && found.length < limit; at += 1) {
    if (wanted.every((id, offset) => all[at + offset] === id)) found.push({ start: at, end: at + wanted.length });
  }
  return found;
}

function findText(texts, wanted, from, limit) {
  if (!wanted) return [];
  const starts = [];
  let length = 0;
  for (const text of texts) {
    starts.push(length);
    length += text.length;
  }
  const tokenAt = (character) => lastUpTo(starts.length, (token) => starts[token], character);
  const text = texts.join("");
  const found = [];
  let at = text.indexOf(wanted, starts[from] ?? length);
  while (at >= 0 && found.length < limit) {
    found.push({ start: tokenAt(at), end: tokenAt(at + wanted.length - 1) + 1 });
    at = text.indexOf(wanted, at + 1);
  }
  return found;
}

const data = document.getElementById("data");

export const source = data ? new Saved(JSON.parse(data.textContent)) : new Live();

/** The tokens of one branch, in windows that are fetched when they are asked for. The last ones used are kept. */
export class Tokens {
  #windows = new Map();
  #path;
  #kept;

  constructor(path, total, size = 2000, kept = 60) {
    this.total = total;
    this.size = Math.min(size, WINDOW);
    this.#path = path;
    this.#kept = kept;
  }

  /** The window with this token if it is here, or null. */
  at(index) {
    const window = this.#windows.get(Math.floor(index / this.size));
    return window?.answer ?? null;
  }

  /** Fetches the window with this token, unless it is here. */
  async fetch(index) {
    const number = Math.floor(index / this.size);
    let window = this.#windows.get(number);
    if (window) this.#windows.delete(number); // put behind the others: it was used last
    else {
      const start = number * this.size;
      const end = Math.min(start + this.size, this.total);
      const promise = source.get(`${this.#path}/tokens${query({ start, end })}`);
      window = { promise, answer: null };
    }
    this.#windows.set(number, window);
    while (this.#windows.size > this.#kept) this.#windows.delete(this.#windows.keys().next().value);
    try {
      window.answer = await window.promise;
    } catch (error) {
      this.#windows.delete(number);
      throw error;
    }
    return window.answer;
  }

  /** Forgets all windows, so that they are fetched again. */
  forget() {
    this.#windows.clear();
  }

  /** What is known of one token, or null if its window is not here. */
  token(index) {
    const window = this.at(index);
    if (!window || index >= window.end) return null;
    const at = index - window.start;
    return {
      index,
      id: window.ids[at],
      text: window.texts[at],
      bytes: window.bytes?.[index] ?? null,
      special: window.special?.includes(index) ?? false,
      sampled: window.mask[at] === 1,
      logprob: window.logprobs?.[at] ?? null,
      version: window.versions[at],
      turn: window.turns[at],
      drift: window.drift?.find((span) => span.start <= index && index < span.end) ?? null,
    };
  }
}
