"""The roles of the workers in a fleet: all of them are regular, or each prefills or decodes.

SGLang's workers tell their role, also when it was switched. vLLM's do not: a flag or a call names it. A new worker that
contradicts the role that a flag or a call names is refused. One that is here already, and had that role, was switched.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from router.workers.pool import WorkerPool
from router.workers.worker import ProbeResult, Worker, WorkerRole

_REGULAR = WorkerRole.REGULAR


class WorkerRoles:
    """Knows the roles that flags and calls have named, and which role a worker may have."""

    def __init__(self, pool: WorkerPool, *, apart: bool) -> None:
        """`apart`: whether all workers are to prefill or to decode (`--pd-disaggregation`)."""
        self._pool = pool
        self._apart = apart
        self._named: dict[str, tuple[WorkerRole, int | None]] = {}
        self._heard: dict[str, tuple[WorkerRole, int | None]] = {}

    def name(self, url: str, role: WorkerRole, bootstrap_port: int | None = None) -> None:
        """Note the role of the worker at a (normalized) URL, and the port where decode workers find it."""
        self._named[url] = role, bootstrap_port

    def heard(self, url: str, role: WorkerRole, bootstrap_port: int | None = None) -> None:
        """Note the role that a worker had when it was added somewhere. It counts where the worker tells none."""
        self._heard[url] = role, bootstrap_port
        if self.named(url)[0] not in (None, role):
            del self._named[url]

    def named(self, url: str) -> tuple[WorkerRole | None, int | None]:
        """Return what `name` was told of a URL."""
        return self._named.get(url, (None, None))

    def checked(self, url: str, found: ProbeResult) -> ProbeResult:
        """Return the result of an introduction with the role of the worker, or a refusal if it cannot have that here."""
        named, port = self.named(url)
        heard, port_then = self._heard.get(url, (None, None))
        known = named or heard
        if found.refusal is not None or (found.engine is None and known is None):
            return found
        if found.engine is None:
            return replace(found, role=known, bootstrap_port=port or port_then)
        role = found.role or known or (None if self._apart else _REGULAR)
        refusal = self._refusal(url, found, named, role)
        if refusal is not None:
            return replace(found, refusal=f"worker {url} {refusal}")
        return replace(found, role=role, bootstrap_port=port or found.bootstrap_port or port_then)

    def _refusal(self, url: str, found: ProbeResult, named: WorkerRole | None, role: WorkerRole | None) -> str | None:
        if role is None:
            return (
                f"runs {found.engine}, which does not say whether it prefills or decodes: name it with --prefill or"
                " --decode, or add it with its `worker_type`"
            )
        if named not in (None, role) and not self._was_switched(url, role):
            assert named is not None
            runs = "without --disaggregation-mode" if role is _REGULAR else f"with --disaggregation-mode {role.value}"
            return f"was added as a {named.value} worker, and runs {runs}"
        if self._apart and role is _REGULAR:
            return "does not run with --disaggregation-mode, and this router was started with --pd-disaggregation"
        for other in self._others(url):
            if (other.role is _REGULAR) is not (role is _REGULAR):
                return (
                    f"is a {role.value} worker, and {other.url} is a {other.role.value} one: where prefill and decode are"
                    " apart, no worker does both. Remove the others first, or start another router for this one"
                )
        return None

    def _was_switched(self, url: str, role: WorkerRole) -> bool:
        """Return whether a worker with this role has told another one of a pair before."""
        here = (one for one in self._pool.list() if one.url == url and one.engine is not None)
        return role is not _REGULAR and any(one.role is not _REGULAR for one in here)

    def _others(self, url: str) -> Iterable[Worker]:
        return (one for one in self._pool.list() if one.url != url and one.engine is not None)
