// Elements are made here and nowhere else. Text only ever becomes a text node, so nothing that a model wrote can become
// markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, to] of Object.entries(value)) element.style.setProperty(key, to);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** An element of HTML: `on...` are listeners, `style` is an object, the other properties are attributes. */
export function h(name, properties, ...children) {
  return fill(document.createElement(name), properties, children);
}

/** An element of SVG. */
export function s(name, properties, ...children) {
  return fill(document.createElementNS(SVG, name), properties, children);
}

/** Puts these children in the place of those that are there. */
export function put(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** A `<select>` with these `[value, text]` pairs. */
export function select(properties, options, chosen) {
  const element = h("select", properties);
  for (const [value, text] of options) element.append(h("option", { value, selected: value === chosen }, text));
  return element;
}

let numbers = 0;

/** A name for an element that no other has. */
export function name(word) {
  numbers += 1;
  return `${word}-${numbers}`;
}

/** A field with its label above it. */
export function labelled(text, control) {
  control.id ||= name("field");
  return h("div", { class: "field" }, h("label", { for: control.id }, text), control);
}

/** A table that scrolls by itself where it is wider than the page. `numeric` are the columns of numbers. */
export function table(caption, head, rows, numeric = []) {
  const classOf = (column) => (numeric.includes(column) ? "number" : undefined);
  return h("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": `${caption}: table` },
    h("table", null,
      h("caption", { class: "hidden" }, caption),
      h("thead", null, h("tr", null, head.map((text, column) => h("th", { scope: "col", class: classOf(column) }, text)))),
      h("tbody", null, rows.map((row) => h("tr", null,
        row.map((cell, column) => h(column ? "td" : "th", { scope: column ? null : "row", class: classOf(column) }, cell)))))));
}
