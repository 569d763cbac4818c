// The parts of a branch. Those that were sampled are turns and have numbers; what stands between them is context.

const known = new WeakMap();

/** The number of each part, from 1; 0 for context. */
export function numbers(turns) {
  if (!known.has(turns)) {
    let number = 0;
    known.set(turns, turns.map((turn) => (turn.sampled ? (number += 1) : 0)));
  }
  return known.get(turns);
}

/** How many parts were sampled. */
export const turnCount = (turns) => numbers(turns).reduce((most, number) => Math.max(most, number), 0);

/** "turn 3", or "context before turn 4", or "context behind turn 9". */
export function nameOf(turns, index) {
  const all = numbers(turns);
  if (all[index]) return `turn ${all[index]}`;
  const next = all.slice(index).find(Boolean);
  if (next) return `context before turn ${next}`;
  const last = turnCount(turns);
  return last ? `context behind turn ${last}` : "context";
}

/** The sampled tokens of a turn. */
export const sampledOf = (turn) => turn.sampled_tokens ?? (turn.sampled ? turn.end - turn.start : 0);
