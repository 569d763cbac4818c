// The tree of a conversation: a line for each run of messages without a fork and without the end of a branch, indented behind both.

import { h } from "../lib/dom.js";
import { thumbnail } from "../lib/images.js";
import { conversationAt } from "../lib/route.js";
import { count, float, plural, short } from "../lib/words.js";
import { edited, exactness } from "./marks.js";

const MOST = 200; // lines
const DEEP = 6; // levels that are indented
const PICTURES = 4; // thumbnails of a line

/** Joins nodes with one child to their child, but for `ends`, where branches end: `[{nodes, depth, leaf}]`, in the order of the tree. */
export function runs(nodes, ends) {
  const children = new Map();
  for (const node of nodes) {
    const key = node.parent ?? null;
    if (!children.has(key)) children.set(key, []);
    children.get(key).push(node);
  }
  const found = [];
  const waiting = (children.get(null) ?? []).map((node) => [node, 0]).reverse();
  while (waiting.length) {
    const [first, depth] = waiting.pop();
    const run = [first];
    let below = children.get(first.id) ?? [];
    while (below.length === 1 && !ends.has(run.at(-1).id)) {
      run.push(below[0]);
      below = children.get(below[0].id) ?? [];
    }
    found.push({ nodes: run, depth, leaf: below.length === 0 });
    for (const node of below.toReversed()) waiting.push([node, depth + 1]);
  }
  return found;
}

/** The tree, with the branch that is shown marked. */
export function tree(conversation, shown) {
  const named = new Map(conversation.branches_list.map((branch) => [branch.id, branch]));
  const all = runs(conversation.tree ?? [], named);
  const lines = all.slice(0, MOST).map((run) => {
    const last = run.nodes.at(-1);
    const passes = run.nodes[0].branch_of ?? [];
    const on = passes.includes(shown);
    const branch = run.leaf ? named.get(last.branch_of?.[0]) : named.get(last.id);
    const target = !run.leaf && branch ? branch.id : on ? shown : passes[0];
    const tokens = run.nodes.reduce((sum, node) => sum + node.tokens, 0);
    const cut = run.nodes.find((node) => node.cuts)?.cuts;
    const images = run.nodes.reduce((sum, node) => sum + (node.images ?? 0), 0);
    const pictures = run.nodes.flatMap((node) => node.pictures ?? []).slice(0, PICTURES);
    return h("li", { class: on ? "on" : "", style: { "--depth": Math.min(run.depth, DEEP) } },
      h("a", { href: conversationAt(conversation.id, target), "aria-current": on && branch && target === shown ? "true" : null },
        h("span", { class: "preview" }, h("span", { class: "dim" }, `${last.role} `), h("bdi", null, (last.preview || run.nodes[0].preview || "(no text)").trim() || "(white space)")),
        h("span", { class: "dim facts" }, `${run.nodes.length > 1 ? `${run.nodes.length} parts · ` : ""}${short(tokens)} tokens`,
          branch && branch.reward !== null && branch.reward !== undefined && ` · reward ${float(branch.reward, 2)}`,
          branch && !branch.exact && [" ", exactness(false, branch.reasons)],
          images > 0 && ` · ${plural(images, "image")}`,
          cut && [" ", edited(cut)]),
        images > 0 && h("span", { class: "pictures" }, pictures.map(thumbnail), images > pictures.length && h("span", { class: "dim", "aria-hidden": "true" }, `+${count(images - pictures.length)}`))));
  });
  if (all.length > MOST) lines.push(h("li", { class: "dim" }, `and ${all.length - MOST} more: choose one in the list of branches`));
  return h("ul", { class: "tree" }, lines);
}
