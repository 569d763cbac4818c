"""The event loop of a router."""

from __future__ import annotations

import subprocess
import sys

import pytest

CONNECT = """
import asyncio, os, socket, sys

from router.serving.server import new_event_loop


async def main(loop):
    with socket.socket() as listener, socket.socket() as client:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        client.setblocking(False)
        before = len(os.listdir("/proc/self/task"))
        await loop.sock_connect(client, listener.getsockname())
        assert client.getpeername() == listener.getsockname()
        assert len(os.listdir("/proc/self/task")) == before
    assert (await loop.getaddrinfo("localhost", 80))[0][4][1] == 80


loop = new_event_loop()
loop.run_until_complete(main(loop))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_connecting_to_an_ip_address_waits_for_no_thread() -> None:
    """There are only four, and they look up names, too: if those hang, no worker could be connected to.

    A process of its own, because the threads are started with the first thing that one of them is asked for.
    """
    subprocess.run([sys.executable, "-c", CONNECT], check=True, timeout=120)
