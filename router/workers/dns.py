"""Workers that come and go: the addresses of a name are the workers (`--worker-dns`).

A headless service of Kubernetes, a service of Consul, or of a compose file has an address for each of its instances. Each name
is looked up again and again. An address that is new is a new worker, one that is gone from every name drains. An answer without
addresses, and no answer, say nothing: a name server that is away must not drain a fleet.

Each router looks for itself, and tells the others nothing. Only workers that were found here are drained here: those of
`--worker-urls` and of calls stay. A worker that a call removes does not come back while its name keeps its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Sequence

from router.workers.membership import FleetMembership

logger = logging.getLogger(__name__)

BEGIN_SECONDS = 5.0
"""How long the start of the router waits for the first addresses and their workers."""

Resolve = Callable[[str, int], Sequence[str]]
"""Returns the addresses of a name and a port. It may block, and raises OSError or UnicodeError."""


def resolve(name: str, port: int) -> list[str]:
    """Return the addresses that the system knows for a name, each once, in its order."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class WorkerDns:
    """See the top of this file."""

    def __init__(
        self, membership: FleetMembership, names: Sequence[str], interval: float, resolve: Resolve = resolve
    ) -> None:
        """Watch names.

        Args:
            membership: registers what is found.
            names: `NAME:PORT` each.
            interval: the seconds between two look-ups of a name.
            resolve: looks a name up, in a thread.
        """
        self._membership = membership
        self._interval = interval
        self._resolve = resolve
        self._found: dict[str, tuple[str, ...] | None] = dict.fromkeys(names)
        """The URLs of each name in its last good answer; None before that."""
        self._faults: dict[str, str] = {}  # by name: what was wrong with the last answer
        self._seen: set[str] = set()  # URLs that were tried, and that some name still has
        self._own: set[str] = set()  # those of them that were registered here
        self._refused: dict[str, str] = {}  # the others: why not
        self._changing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Look all names up, and keep doing so. The first answers are waited for, but not for long."""
        firsts = []
        for name in self._found:
            first = asyncio.Event()
            self._tasks.append(asyncio.create_task(self._watch(name, first)))
            firsts.append(asyncio.create_task(first.wait()))
        if firsts:
            _, late = await asyncio.wait(firsts, timeout=BEGIN_SECONDS)
            for one in late:
                one.cancel()

    def close(self) -> None:
        """Look no more."""
        for task in self._tasks:
            task.cancel()

    async def _watch(self, name: str, first: asyncio.Event) -> None:
        host, _, port = name.rpartition(":")
        while True:
            try:
                await self._look(name, host.strip("[]"), int(port), begun=not first.is_set())
            except Exception:
                logger.exception("the addresses of %s could not be taken over", name)
            first.set()
            await asyncio.sleep(self._interval)

    async def _look(self, name: str, host: str, port: int, *, begun: bool) -> None:
        try:
            addresses = await in_thread(lambda: self._resolve(host, port))
        except (OSError, UnicodeError) as error:
            self._fault(name, str(getattr(error, "strerror", None) or error))
            return
        urls = tuple(dict.fromkeys(filter(None, (_url(address, port) for address in addresses))))
        if not urls:
            self._fault(name, "it has no address")
            return
        if self._faults.pop(name, None) is not None:
            logger.info("%s can be looked up again: %d addresses", name, len(urls))
        if urls == self._found[name] and not self._refused.keys() & set(urls):
            return
        async with self._changing:
            self._found[name] = urls
            await self._change(name, begun=begun)

    def _fault(self, name: str, fault: str) -> None:
        """Keep the last addresses. What is wrong is logged once, not every five seconds."""
        if self._faults.get(name) != fault:
            last = self._found[name]
            kept = "there are no workers of it yet" if last is None else f"its last {len(last)} addresses stay"
            logger.warning("--worker-dns %s: %s; %s", name, fault, kept)
        self._faults[name] = fault

    async def _change(self, name: str, *, begun: bool) -> None:
        """Register the workers that are new in the answers of all names, and drain those that none has any more."""
        wanted = {url for urls in self._found.values() for url in urls or ()}
        for url in self._seen - wanted:
            self._seen.discard(url)
            self._refused.pop(url, None)
            if url in self._own:
                self._own.discard(url)
                if self._membership.was_added(url):
                    logger.info("worker %s stays: %s has its address no more, and a call has added it", url, name)
                    continue
                logger.info("worker %s drains: %s has its address no more", url, name)
                self._membership.lost(url)
        new = [url for url in self._found[name] or () if url not in self._seen or url in self._refused]
        self._seen.update(new)
        await asyncio.gather(*(self._take(name, url, begun=begun) for url in new))

    async def _take(self, name: str, url: str, *, begun: bool) -> None:
        if begun and self._membership.was_removed(url):
            logger.warning("worker %s of %s is not routed to: a call has removed it", url, name)
            return
        if (known := await self._membership.here(url)) is not None:
            logger.info("%s, an address of %s, is registered already, as %s", url, name, known)
            return
        refusal = await self._membership.found(url)
        if refusal is None:
            self._refused.pop(url, None)
            self._own.add(url)
            logger.info("worker %s is an address of %s", url, name)
        elif self._refused.get(url) != refusal:
            self._refused[url] = refusal
            logger.warning("%s, an address of %s, is not routed to: %s", url, name, refusal)


def _url(address: str, port: int) -> str | None:
    """Return the URL of a worker at an address; None for one that says on which interface it is, which no URL may."""
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(address)
        plain = getattr(found, "ipv4_mapped", None) or found
        if not getattr(plain, "scope_id", None):
            return f"http://[{plain}]:{port}" if plain.version == 6 else f"http://{plain}:{port}"
    return None


async def in_thread(work: Callable[[], Sequence[str]]) -> Sequence[str]:
    """Return the result of work in a thread of its own: a name server may take half a minute, and the process may end sooner.

    The threads of the event loop's executor would all wait for it, and so would the end of the process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Sequence[str]] = loop.create_future()

    def done(result: Sequence[str] | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result or ())

    def run() -> None:
        found, wrong = None, None
        try:
            found = work()
        except Exception as error:  # noqa: BLE001 - it is raised again, where it is waited for
            wrong = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(done, found, wrong)

    threading.Thread(target=run, name="worker-dns", daemon=True).start()
    return await future
