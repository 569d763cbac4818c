// Places of the page, behind the #: they can be bookmarked and sent to a colleague.

/** `{view, parts, fields}` of a place. */
export function parse(hash) {
  const [path, search] = hash.replace(/^#\/?/, "").split("?");
  const [view, ...parts] = path.split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return { view: view || "overview", parts, fields: Object.fromEntries(new URLSearchParams(search)) };
}

export function href(view, parts = [], fields = {}) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(fields)) if (value !== undefined && value !== null && value !== "") search.set(name, value);
  const text = search.toString();
  return `#/${[view, ...parts].map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

/** Changes the place without a new entry in the history, and without drawing again. */
export function replace(view, parts, fields) {
  history.replaceState(null, "", href(view, parts, fields));
}

/** The place of a conversation, or of a token of one of its branches. */
export const conversationAt = (id, branch, fields) => href("conversation", branch === undefined ? [id] : [id, branch], fields);
