// What is remembered, newest first, as it comes in; filters and searches.

import { h, labelled, put, select } from "../lib/dom.js";
import { conversationAt, href, replace } from "../lib/route.js";
import { query, source } from "../lib/source.js";
import { REASONS, count, float, percent, plural } from "../lib/words.js";
import { exactness, trouble, versions, when } from "./marks.js";
import { tokenIds } from "./search.js";

const POLL = 2000; // ms
const ELSEWHERE = ["retokenized", "media_missing", "media_orientation"]; // reasons of an answer, and of no conversation
const PAGE = 50;
const MOST = 200; // rows of one answer
const SINCE = [["", "any time"], ["600", "10 min"], ["3600", "an hour"], ["86400", "a day"]];
const UNTIL = [["", "now"], ["600", "10 min ago"], ["3600", "1 h ago"], ["86400", "a day ago"]];

export async function overview(main, { fields }) {
  const view = new Overview(main, fields);
  view.draw();
  await view.load();
  return view;
}

class Overview {
  #closed = false;
  #timer = 0;
  #change;
  #round = 0;

  constructor(main, fields) {
    this.main = main;
    this.fields = fields;
  }

  draw() {
    const { fields } = this;
    const field = (key, label, properties = {}) => labelled(label, h("input", { name: key, value: fields[key] ?? "", autocomplete: "off", spellcheck: "false", ...properties }));
    const choice = (key, label, options) => labelled(label, select({ name: key }, options, fields[key] ?? ""));
    this.form = h("form", { class: "filters", role: "search", "aria-label": "Conversations",
      onsubmit: (event) => event.preventDefault(), oninput: () => this.#changed() },
    field("q", "Search", { type: "search", placeholder: "text, id, or ids: 12, 7", class: "wide" }),
    choice("kind", "Kind", [["", "all"], ["text", "text"], ["session", "sessions"]]),
    choice("exact", "Exactness", [["", "all"], ["true", "exact"], ["false", "not exact"]]),
    choice("reason", "Reason", [["", "any"], ...Object.keys(REASONS).filter((reason) => !ELSEWHERE.includes(reason)).map((reason) => [reason, reason])]),
    field("namespace", "Namespace"),
    field("version", "Version", { class: "narrow" }),
    field("reward_min", "Reward from", { type: "number", step: "any", class: "narrow" }),
    field("reward_max", "to", { type: "number", step: "any", class: "narrow" }),
    choice("since", "Updated within", SINCE),
    choice("until", "before", UNTIL),
    h("button", { type: "button", class: "plain", onclick: () => this.#clear() }, "Clear"));
    if (fields.group) this.form.prepend(h("p", { class: "chosen" }, "only the group ", h("b", { class: "id" }, fields.group), " ", h("a", { href: href("overview") }, "all")));
    this.sum = h("p", { class: "sum", role: "status" });
    this.list = h("div", { class: "list" });
    put(this.main, h("header", { class: "head" }, h("h1", null, "What is remembered"), this.sum), this.form, this.list);
  }

  close() {
    this.#closed = true;
    clearTimeout(this.#timer);
  }

  key(event) {
    if (event.key !== "/") return false;
    this.form.elements.q.focus();
    return true;
  }

  /** Asks for the newest ones, and goes on asking whether there is news. */
  async load() {
    clearTimeout(this.#timer);
    const round = (this.#round += 1);
    this.byId = false;
    let answer = await source.get(`/conversations${query({ ...this.#asked(), limit: PAGE })}`);
    const { text } = this.#asked();
    if (!answer.conversations.length && !answer.next && text && !/\s/.test(text)) {
      this.byId = true; // no text has it: it may be an id
      answer = await source.get(`/conversations${query({ ...this.#asked(), limit: PAGE })}`);
    }
    if (this.#closed || round !== this.#round) return;
    this.#change = answer.change;
    this.rows = answer.conversations;
    this.next = answer.next;
    this.#show(answer.remembered);
    while (this.next && this.rows.length < PAGE && round === this.#round && !this.#closed) await this.#more(); // a long search answers in parts
    this.#poll();
  }

  #poll() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(async () => {
      if (this.#closed) return;
      const round = this.#round;
      try {
        if (document.visibilityState === "visible" && this.#change !== undefined) {
          const many = Math.max(PAGE, Math.min(this.rows.length, MOST));
          const answer = await source.get(`/conversations${query({ ...this.#asked(), limit: many, changed_since: this.#change })}`);
          if (this.#closed || round !== this.#round) return;
          if (answer) {
            this.#change = answer.change;
            this.#merge(answer);
            this.#show(answer.remembered);
          }
        }
      } catch (error) {
        if (!this.#closed) put(this.sum, trouble(error));
      }
      if (!this.#closed) this.#poll();
    }, POLL);
  }

  /** Puts the newest ones in front of those that are shown. */
  #merge({ conversations, next }) {
    const fresh = new Set(conversations.map((row) => row.id));
    const older = this.rows.length > conversations.length && next ? this.rows.filter((row) => !fresh.has(row.id)) : [];
    if (!older.length) this.next = next;
    this.rows = [...conversations, ...older];
  }

  async #more() {
    const round = this.#round;
    const answer = await source.get(`/conversations${query({ ...this.#asked(), limit: PAGE, cursor: this.next })}`);
    if (this.#closed || round !== this.#round) return;
    const known = new Set(this.rows.map((row) => row.id));
    this.rows.push(...answer.conversations.filter((row) => !known.has(row.id)));
    this.next = answer.next;
    this.#show(answer.remembered);
  }

  #values() {
    return Object.fromEntries([...new FormData(this.form)].filter(([, value]) => value !== ""));
  }

  /** The fields of the API for what stands in the form. A search is for ids, for token ids, or for text. */
  #asked() {
    const { q, since, until, ...rest } = this.#values();
    const asked = { ...rest };
    const before = Number(until ?? 0); // an hour up to a day ago is the hour before that
    if (until) asked.until = Math.floor(Date.now() / 1000 - before);
    if (since) asked.since = Math.floor(Date.now() / 1000 - before - Number(since));
    if (this.fields.group) asked.group = this.fields.group;
    if (q) {
      const ids = tokenIds(q);
      if (ids) asked.token_ids = ids.join(",");
      else if (this.byId || /^(id|session|text):/.test(q)) asked.id = q.replace(/^id:/, "");
      else asked.text = q;
    }
    return asked;
  }

  #changed() {
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => {
      replace("overview", [], { ...this.#values(), group: this.fields.group });
      this.load().catch((error) => put(this.list, trouble(error)));
    }, 250);
  }

  #clear() {
    for (const element of this.form.elements) if (element.name) element.value = "";
    this.#changed();
  }

  #show(remembered) {
    const { conversations, sessions, tokens, more, processes } = remembered;
    put(this.sum, h("b", { "data-sum": "conversations" }, count(conversations)), ` ${conversations === 1 ? "conversation" : "conversations"}, `,
      h("b", { "data-sum": "sessions" }, count(sessions)), " of them sessions, ", h("b", { "data-sum": "tokens" }, count(tokens)), " tokens in memory.",
      more && " The store has more sessions, which are still to be read.",
      processes > 1 && ` This is the memory of one of ${count(processes)} processes: another one may answer next, and has other texts.`,
      h("span", { class: "dim" }, " New ones appear by themselves."));
    if (!this.rows.length) {
      put(this.list, this.next ? h("p", { class: "dim" }, "Still searching …") : Object.keys(this.#asked()).length ? this.#nothingFits() : empty());
      return;
    }
    const sizes = new Map();
    for (const { group } of this.rows) if (group) sizes.set(group, (sizes.get(group) ?? 0) + 1);
    const focused = document.activeElement?.closest?.("a")?.getAttribute("href");
    put(this.list, h("div", { class: "scrolls", role: "region", "aria-label": "Conversations", tabindex: 0 },
      h("table", { class: "conversations" },
        h("caption", { class: "hidden" }, "Conversations, newest first"),
        h("thead", null, h("tr", null, HEAD.map(([text, kind]) => h("th", { scope: "col", class: kind }, text)))),
        h("tbody", null, this.rows.map((row) => line(row, this.fields.group ? 1 : sizes.get(row.group)))))),
    this.next && h("p", null, h("button", { type: "button", onclick: () => this.#more().catch((error) => put(this.sum, trouble(error))) }, "Show older ones")));
    if (focused) [...this.list.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus({ preventScroll: true });
  }

  #nothingFits() {
    return h("div", { class: "empty" }, h("h2", null, "Nothing fits"), h("p", null, "No conversation passes all of these filters. "),
      h("button", { type: "button", onclick: () => this.#clear() }, "Clear the filters"));
  }
}

const HEAD = [["Conversation"], ["Exactness"], ["Turns", "number"], ["Tokens", "number"], ["Sampled", "number"], ["Branches", "number"], ["Versions"], ["Reward", "number"], ["Updated"]];

function line(row, size) {
  return h("tr", { "data-id": row.id },
    h("th", { scope: "row" },
      h("a", { href: conversationAt(row.id), dir: "auto" }, row.title?.trim() || "(no text)"),
      h("div", { class: "dim under" }, row.kind === "session" && h("span", { class: "mark" }, "session"), row.images > 0 && h("span", { class: "mark" }, plural(row.images, "image")), row.namespace && h("span", null, `in ${row.namespace}`),
        size > 1 && h("a", { class: "mark", href: href("overview", [], { group: row.group }), title: "Of those that are listed. Shows the whole group." }, `one of ${size} samples`), h("span", { class: "id" }, row.id))),
    h("td", null, exactness(row.exact, row.reasons)),
    h("td", { class: "number", "data-label": "turns" }, count(row.turns)),
    h("td", { class: "number", "data-label": "tokens" }, count(row.tokens)),
    h("td", { class: "number", "data-label": "sampled", title: `${count(row.sampled)} of ${plural(row.tokens, "token")}` }, percent(row.sampled, row.tokens)),
    h("td", { class: "number", "data-label": "branches" }, count(row.branches)),
    h("td", { "data-label": "versions" }, versions(row.versions)),
    h("td", { class: "number", "data-label": "reward" }, row.reward === null || row.reward === undefined ? "–" : float(row.reward, 2)),
    h("td", { "data-label": "updated" }, when(row.updated)));
}

function empty() {
  const origin = location.origin === "null" ? "http://127.0.0.1:30000" : location.origin;
  return h("div", { class: "empty" },
    h("h2", null, "Nothing is remembered yet"),
    h("p", null, "Send a generation through this router, and it appears here within two seconds:"),
    h("pre", { tabindex: 0, role: "region", "aria-label": "A first request" }, `curl ${origin}/generate -H 'content-type: application/json' -d '{\n  "text": "Question: What is 6 * 7?\\n",\n  "sampling_params": {"max_new_tokens": 32}}'`),
    h("p", null, "Agents that use OpenAI's or Anthropic's client appear as soon as they have a session. ",
      "Have you sent some already? Then look at the key: each tenant sees its own memory only. Or ",
      h("a", { href: href("explain") }, "paste a text"), " and see where it leaves what is recorded."));
}
