#!/usr/bin/env bash
# Guess: a game of TextArena that is reset with a seed has a generator of its own, as environments of Gymnasium have: the seed
# decides the game, and nothing else in the process.
# Instead (TextArena 0.7.4): `env.reset(seed=5)` is `random.seed(5)` for the whole process, and each later card, die and tile is
# drawn from there. What a trainer draws after a reset is the same after each reset with that seed. A second game that is played
# beside the first changes it: the board of 2048 is another one after the same seed and the same moves.
# Hurts: a group of rollouts on one seed, whose games are not the same game; a batch of prompts, a shuffle or a task that is
# drawn after a reset, and is the same in each step. NumPy and torch have other generators.
# Here: the client draws its waits from the system's generator: no seed makes clients return together, and no wait changes a game.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile TextArena==0.7.4
"$tmp/venv/bin/python" - <<'PY'
import random
import sys
from importlib.metadata import version

import textarena

MOVES = ("[up]", "[left]", "[up]", "[left]")


def game(seed):
    env = textarena.make("2048-v0")
    env.reset(num_players=1, seed=seed)
    return env


def play(*others):
    """Play a game, and a step of each other game after each of its steps."""
    games = [game(5), *map(game, others)]
    for move in MOVES:
        for env in games:
            env.get_observation()
            env.step(move)
    return games[0].state.game_state["board"]


def draw(name, players, seed):
    random.seed()
    textarena.make(name).reset(num_players=players, seed=seed)
    return random.sample(range(1000), 3)


print("TextArena", version("TextArena"))
alone, again, beside = play(), play(), play(77)
for name, board in (("alone", alone), ("alone again", again), ("beside another", beside)):
    print(f"2048 with seed 5, {name:16} {board}")
changed = alone != again or alone == beside
for name, players in (("2048-v0", 1), ("ConnectFour-v0", 2), ("Poker-v0", 2), ("Sudoku-v0", 1), ("FrozenLake-v0", 1)):
    drawn = [draw(name, players, seed) for seed in (5, 5, 6)]
    print(f"what the process draws after resets of {name:16} with seed 5, 5 and 6: {drawn}")
    changed |= drawn[0] != drawn[1] or drawn[0] == drawn[2]
sys.exit("changed" if changed else 0)
PY
