// The page: its head, its places, its keys. Each view draws itself into <main>.

import { h, put } from "./lib/dom.js";
import { href, parse } from "./lib/route.js";
import { ApiError, source } from "./lib/source.js";
import { clock } from "./lib/words.js";
import { compare } from "./views/compare.js";
import { conversation } from "./views/conversation.js";
import { ask, help } from "./views/dialogs.js";
import { explain } from "./views/explain.js";
import { refreshAges, trouble } from "./views/marks.js";
import { overview } from "./views/overview.js";
import { run } from "./views/run.js";

const VIEWS = { overview, conversation, compare, explain, run };
const PLACES = [["overview", "Overview"], ["run", "Run"], ["explain", "Explain"], ["compare", "Compare"]];
const THEMES = { auto: "as the system", light: "light", dark: "dark" };
const THEME = "tito-inspector-theme";
const AGES = 5000; // ms

const main = h("main", { id: "main", tabindex: -1 });
const links = source.saved ? [] : PLACES.map(([view, text]) => h("a", { href: href(view), "data-view": view }, text));
let shown = null;
let round = 0;

function stored(set) {
  try { // a saved page may have no storage
    if (set !== undefined) localStorage.setItem(THEME, set);
    return localStorage.getItem(THEME);
  } catch {
    return null;
  }
}

function theme(choice) {
  if (choice === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", choice);
}

function themeSwitch() {
  const chosen = stored() in THEMES ? stored() : "auto";
  theme(chosen);
  return h("select", {
    "aria-label": "Theme", class: "theme", onchange: (event) => {
      theme(event.target.value);
      stored(event.target.value);
    },
  }, Object.entries(THEMES).map(([value, text]) => h("option", { value, selected: value === chosen }, `Theme: ${text}`)));
}

function savedHome() {
  const [first] = source.branches;
  return first ? href("conversation", first) : href("run");
}

async function draw() {
  const place = parse(location.hash);
  const mine = (round += 1);
  shown?.close?.();
  shown = null;
  const shows = place.view in VIEWS ? place.view : "overview";
  for (const link of links) {
    if (link.dataset.view === shows) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const view = VIEWS[shows];
  document.title = `${shows} · inspector`;
  const target = h("div", { class: `view view-${shows}` }, h("p", { class: "dim waiting" }, "Loading …"));
  put(main, target);
  try {
    const drawn = await view(target, place);
    if (mine === round) shown = drawn;
    else drawn?.close?.();
  } catch (error) {
    if (!(error instanceof ApiError)) console.error(error);
    const missing = error instanceof ApiError && error.status === 404;
    put(target, h("h1", null, missing ? "It is not here" : "This cannot be shown"), trouble(error), missing && (source.saved
      ? h("p", null, h("a", { href: savedHome() }, "Show what it holds."))
      : h("p", null, "It may have been evicted, or its session was ended. ", h("a", { href: href("overview") }, "See what is remembered now."))));
  }
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.closest("input, textarea, select");
  if (typing) return;
  if (event.key === "?") help();
  else if (!shown?.key?.(event)) return;
  event.preventDefault();
}

source.askForKey = (text) => ask({ title: "This router needs a key", label: "Key (kept for this tab only)", text, type: "password", button: "Go on" });

document.body.append(
  h("a", { class: "skip", href: "#main", onclick: (event) => {
    event.preventDefault();
    main.focus();
  } }, "Skip to the content"),
  h("header", { class: "top" },
    h("span", { class: "name" }, "tito", h("span", { class: "dim" }, " inspector")),
    h("nav", { "aria-label": "Views" }, links),
    source.saved && h("span", { class: "dim" }, `saved ${clock(source.at)}`),
    h("span", { class: "spacer" }),
    themeSwitch(),
    source.key && h("button", { type: "button", class: "plain", onclick: () => {
      source.key = null;
      location.reload();
    } }, "Forget the key"),
    h("button", { type: "button", class: "plain", onclick: help, "aria-label": "Keys" }, "?")),
  main,
);
addEventListener("hashchange", draw);
addEventListener("keydown", keys);
setInterval(refreshAges, AGES);
if (source.saved && !location.hash) history.replaceState(null, "", savedHome());
draw();
