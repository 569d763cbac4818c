// Images: their names in words, where they stand among the tokens, and their thumbnails, which are fetched as they come into view.

import { h } from "./dom.js";
import { lastUpTo } from "./rows.js";
import { source } from "./source.js";
import { bytes, count, plural } from "./words.js";

const AT_ONCE = 4; // files fetched at one time
const KEPT = 64e6; // characters of files that are kept
const NEAR = "300px"; // how far from the view an image is fetched

/** What is known of an image in words: "640 × 480 pixels, PNG, 12 KB"; of one whose file is gone, that it is. */
export function facts(image) {
  if (!held(image)) return "the file is not held any more";
  return `${count(image.width)} × ${count(image.height)} pixels, ${image.mime.replace("image/", "").toUpperCase()}, ${bytes(image.size)}`;
}

export const held = (image) => image.size !== null && image.size !== undefined;

/** The first characters of a digest. */
export const named = (digest) => digest.slice(0, "sha256:".length + 12);

export const tokensOf = (image) => image.span[1] - image.span[0];

/** What is read aloud for an image. */
export const spoken = (image) => `image, ${plural(tokensOf(image), "token")}, ${facts(image)}, ${named(image.digest)}`;

/** The image that a token is a part of, or null. `images` are those of a sequence, in order. */
export function imageAt(images, index) {
  const image = images?.[lastUpTo(images.length, (number) => images[number].span[0], index)];
  return image && image.span[0] <= index && index < image.span[1] ? image : null;
}

/** The places of a sequence, in which an image is one place however many tokens it has. */
export class Places {
  #starts; // the place of each image
  #images;

  constructor(images = []) {
    let fewer = 0;
    this.#images = images;
    this.#starts = images.map((image) => {
      const place = image.span[0] - fewer;
      fewer += tokensOf(image) - 1;
      return place;
    });
  }

  /** The place of a token. */
  of(index) {
    const images = this.#images;
    const number = lastUpTo(images.length, (one) => images[one].span[0], index);
    if (!images.length || images[number].span[0] > index) return index;
    return this.#starts[number] + Math.max(0, index - images[number].span[1] + 1);
  }

  /** The first token of a place. */
  token(place) {
    const number = lastUpTo(this.#starts.length, (one) => this.#starts[one], place);
    if (!this.#starts.length || this.#starts[number] > place) return place;
    return this.#starts[number] === place ? this.#images[number].span[0] : place - this.#starts[number] - 1 + this.#images[number].span[1];
  }
}

const files = new Map(); // digest -> promise of its URL, the last used behind the others
const waiting = [];
let fetching = 0;
let kept = 0;

/** The file of an image as a URL, fetched once. */
export function fileOf(digest) {
  let known = files.get(digest);
  if (known) files.delete(digest);
  else {
    known = source.picture(digest);
    known.then((url) => {
      kept += url.length;
      for (const [name, promise] of files) {
        if (kept <= KEPT || name === digest) break;
        files.delete(name);
        promise.then((other) => (kept -= other.length), () => null);
      }
    }, () => files.delete(digest));
  }
  files.set(digest, known);
  return known;
}

const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    seen.unobserve(target);
    waiting.push(target);
  }
  fetchNext();
}, { rootMargin: NEAR, scrollMargin: NEAR });

function fetchNext() {
  while (fetching < AT_ONCE && waiting.length) {
    const element = waiting.shift();
    if (!element.isConnected) continue; // it was scrolled past
    fetching += 1;
    fileOf(element.dataset.digest).then((url) => show(element, url), () => element.classList.add("gone")).finally(() => {
      fetching -= 1;
      fetchNext();
    });
  }
}

function show(element, url) {
  element.replaceChildren(h("img", { src: url, alt: "", decoding: "async", draggable: "false" }));
}

/** A frame of a fixed size with the image in it once it is near the view. What it shows must be said beside it. */
export function thumbnail(image) {
  const element = h("span", { class: `thumbnail ${held(image) ? "" : "gone"}`, "data-digest": image.digest, "aria-hidden": "true" });
  if (held(image)) seen.observe(element);
  return element;
}
