"""The faults, at random: SIGKILL, SIGSTOP, and what networks do. Each fault is written into the ledger."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable

from benchmarks.many_routers.ledger import Fault, Ledger
from benchmarks.many_routers.machines import Machines
from benchmarks.many_routers.network import LOSSES
from benchmarks.many_routers.wire import State

PAUSE = (0.3, 2.0)
MOST_STEP = 900
"""The seconds by which a clock is set ahead or behind at most."""


class Faults:
    """Causes faults one after the other, now and then two at once."""

    def __init__(self, machines: Machines, ledger: Ledger, seed: int) -> None:
        self._machines, self._ledger = machines, ledger
        self._dice = random.Random(seed)
        self._stopping = threading.Event()
        self._version = 0
        self.counts: Counter[str] = Counter()

    def stop(self) -> None:
        """Stop after the present fault."""
        self._stopping.set()

    def run(self) -> None:
        """Hurt the machines until `stop`."""
        dice = self._dice
        kinds: list[Callable[[], None]] = [self._kill_router, self._freeze_router, self._new_weights]
        if self._machines.redis is not None:
            kinds += [self._kill_redis, self._freeze_redis, self._wire, self._wire, self._two]
        if self._machines.network is not None:
            kinds += [self._network, self._network]
        if self._machines.disk is not None:
            kinds += [self._full_disk]
            kinds += [self._hanging_disk, self._slow_disk] if self._machines.disk.hangs else []
        if self._machines.clocks is not None:
            kinds += [self._clock]
        while not self._stopping.wait(dice.uniform(*PAUSE)):
            dice.choice(kinds)()

    def _begin(self, what: str) -> Fault:
        self.counts[re.split(" of routers?[ ,]", what)[0]] += 1
        return self._ledger.fault(what)

    def _wait(self, most: float) -> None:
        self._stopping.wait(self._dice.uniform(0, most))

    def _kill_router(self) -> None:
        number = self._dice.randrange(len(self._machines.routers))
        router = self._machines.routers[number]
        fault = self._begin(f"kill -9 of router {number}")
        router.kill()
        self._wait(1.0)
        router.start()
        router.wait_until_up()
        fault.until = self._ledger.now()

    def _freeze_router(self) -> None:
        number = self._dice.randrange(len(self._machines.routers))
        fault = self._begin(f"SIGSTOP of router {number}")
        self._machines.routers[number].freeze()
        self._wait(4.0)
        self._machines.routers[number].thaw()
        fault.until = self._ledger.now()

    def _new_weights(self) -> None:
        """Cause no fault, but a change that all routers have to learn of."""
        self._version += 1
        for worker in (*self._machines.prefills, *self._machines.workers):
            worker.set_weight_version(str(self._version))

    def _kill_redis(self) -> None:
        assert self._machines.redis is not None
        fault = self._begin("kill -9 of redis")
        self._machines.redis.kill()
        self._wait(2.0)
        self._machines.redis.start()
        self._machines.redis.wait_until_up()
        fault.until = self._ledger.now()

    def _freeze_redis(self) -> None:
        assert self._machines.redis is not None
        fault = self._begin("SIGSTOP of redis")
        self._machines.redis.freeze()
        self._wait(5.0)
        self._machines.redis.thaw()
        fault.until = self._ledger.now()

    def _wire(self) -> None:
        dice = self._dice
        states: tuple[State, ...] = ("slow", "silent", "deaf", "cut", "cut")
        state = dice.choice(states)
        chosen = self._some(len(self._machines.wires))
        fault = self._begin(f"wire {state} of routers {chosen}")
        for number in chosen:
            self._machines.wires[number].set(state)
        if state == "cut" and dice.random() < 0.5:
            time.sleep(0.01)  # only long enough to break the connections
        else:
            self._wait(4.0)
        for number in chosen:
            self._machines.wires[number].set("whole")
        fault.until = self._ledger.now()

    def _network(self) -> None:
        """Lose packets between some routers and the store."""
        network, dice = self._machines.network, self._dice
        assert network is not None
        loss = dice.choice(LOSSES)
        chosen = self._some(self._machines.count)
        fault = self._begin(f"network {loss} of routers {chosen}")
        for number in chosen:
            network.set(number, loss)
        self._wait(8.0)
        for number in chosen:
            network.set(number, "none")
        fault.until = self._ledger.now()

    def _some(self, count: int) -> list[int]:
        return [number for number in range(count) if self._dice.random() < 0.5] or [0]

    def _full_disk(self) -> None:
        """Leave no room for the store. Redis ends over it, if it has to write what it acknowledges, and comes again."""
        disk, redis = self._machines.disk, self._machines.redis
        assert disk is not None
        fault = self._begin("full disk")
        disk.fill()
        self._wait(3.0)
        disk.empty()
        if redis is not None and not redis.alive:
            redis.start()
            redis.wait_until_up()
        fault.until = self._ledger.now()

    def _hanging_disk(self) -> None:
        assert self._machines.disk is not None
        fault = self._begin("hanging disk")
        self._machines.disk.hang()
        self._wait(4.0)
        self._machines.disk.go_on()
        fault.until = self._ledger.now()

    def _slow_disk(self) -> None:
        assert self._machines.disk is not None
        fault = self._begin("slow disk")
        self._machines.disk.crawl(self._stopping, self._dice.uniform(1, 6))
        fault.until = self._ledger.now()

    def _clock(self) -> None:
        """Set the wall clock of one machine, minutes ahead or behind. It stays so until it is set again."""
        dice, clocks = self._dice, self._machines.clocks
        assert clocks is not None
        number = dice.randrange(len(clocks))
        to = dice.choice((0, dice.randint(-MOST_STEP, MOST_STEP)))
        whose = "routers" if len(clocks) == 1 else f"router {number}"
        fault = self._begin(f"clock set of {whose}, by {to - clocks[number].seconds:+} s")
        clocks[number].set(to)
        fault.until = self._ledger.now()

    def _two(self) -> None:
        """Take Redis away, and kill a router that waits for it."""
        assert self._machines.redis is not None
        number = self._dice.randrange(len(self._machines.routers))
        fault = self._begin(f"SIGSTOP of redis, then kill -9 of router {number}")
        self._machines.redis.freeze()
        self._wait(2.0)
        self._machines.routers[number].kill()
        self._wait(1.0)
        self._machines.redis.thaw()
        self._machines.routers[number].start()
        self._machines.routers[number].wait_until_up()
        fault.until = self._ledger.now()
