// Rows of a long text in tokens: where each one begins, and how high it is. A row is a piece of one turn. Heights are guessed
// until a row was drawn once. An image has a row of its own, however many tokens it is.

export const MOST = 128; // tokens of a row

/** Cuts `total` tokens into rows at the beginnings of turns. `turns` have `start` and `end`, `images` a `span`, in order. */
export function cutRows(total, turns, images = []) {
  const rows = [];
  let at = 0;
  let next = 0; // the first image that does not end before `at`
  const until = (end, turn) => {
    for (let first = true; at < end; first = false) {
      while (next < images.length && images[next].span[1] <= at) next += 1;
      const [from, to] = images[next]?.span ?? [end, end];
      const inside = from <= at;
      const stop = Math.min(inside ? to : Math.min(at + MOST, from), end);
      rows.push({ start: at, end: stop, turn, first, image: inside && at < to ? images[next] : null });
      at = stop;
    }
  };
  turns.forEach((turn, number) => {
    until(Math.min(turn.start, total), -1);
    until(Math.min(turn.end, total), number);
  });
  until(total, -1);
  return rows;
}

export class Heights {
  #heights;
  #tops;
  #drawn;
  #valid = 0; // tops up to this row are right

  constructor(guesses) {
    this.#heights = Float64Array.from(guesses);
    this.#drawn = new Uint8Array(guesses.length);
    this.#tops = new Float64Array(guesses.length + 1);
  }

  get count() {
    return this.#heights.length;
  }

  /** The distance of a row from the top; of one behind the last: the height of all. */
  top(row) {
    for (; this.#valid < row; this.#valid += 1) {
      this.#tops[this.#valid + 1] = this.#tops[this.#valid] + this.#heights[this.#valid];
    }
    return this.#tops[row];
  }

  height(row) {
    return this.#heights[row];
  }

  /** Notes what a row measures. Returns whether that is news. */
  measured(row, height) {
    this.#drawn[row] = 1;
    if (Math.abs(this.#heights[row] - height) < 0.5) return false;
    this.#heights[row] = height;
    this.#valid = Math.min(this.#valid, row);
    return true;
  }

  wasDrawn(row) {
    return this.#drawn[row] === 1;
  }

  /** The row at this distance from the top. */
  at(distance) {
    this.top(this.count);
    return lastUpTo(this.count, (row) => this.#tops[row], distance);
  }
}

/** The row of a token, by where rows start. */
export const rowOf = (rows, index) => lastUpTo(rows.length, (row) => rows[row].start, index);

/** The last of `count` places whose start is not above `value`; starts never fall. 0 if there is none. */
export function lastUpTo(count, startOf, value) {
  let [low, high] = [0, count - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (startOf(middle) <= value) low = middle;
    else high = middle - 1;
  }
  return low;
}
