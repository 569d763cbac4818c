"""What a request costs the router that goes to a prefill and a decode worker: `python -m benchmarks.serving.apart`.

Two routers, each a process of its own: one in front of a scripted demo worker, one in front of a pair of them. They take turns
with the same requests, so that the ratio of their CPU holds on a noisy machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.support.programs import Program
from worker.models.ngram import shipped_tokenizer

AIM = 1.6
_HEADERS = {"content-type": "application/json"}


def cpu(router: Program) -> float:
    times = psutil.Process(router.pid).cpu_times()
    return float(times.user + times.system)


def asked(url: str, stream: bool, count: int, number: int) -> None:
    """Send requests one after the other over one connection."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    for turn in range(count):
        text = f"Client {number} says {turn}: " + "Once upon a time there was a king. " * 20
        body = {"text": text, "sampling_params": {"max_new_tokens": 128}, "stream": stream}
        connection.request("POST", "/generate", json.dumps(body), _HEADERS)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="(%(default)s)")
    parser.add_argument("--clients", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--each", type=int, default=40, help="requests of a client in a round (%(default)s)")
    arguments = parser.parse_args()
    with ExitStack() as entered:
        logs = Path(entered.enter_context(tempfile.TemporaryDirectory()))

        def program(name: str, *flags: str) -> Program:
            started = entered.enter_context(Program(name, *flags, folder=logs))
            started.wait_until_up()
            return started

        def worker(role: str) -> Program:
            flags = ("--scripted", "--disaggregation-mode", role)
            return program(f"worker-{role}", "demo-worker", *flags)

        folder = ("--tokenizer-path", str(shipped_tokenizer()))
        one = program("router-one", *folder, "--worker-urls", worker("null").url)
        both = (worker("prefill").url, worker("decode").url)
        two = program("router-two", *folder, "--pd-disaggregation", "--worker-urls", *both)
        for stream in (False, True):
            ratios, costs = [], []
            for turn in range(arguments.rounds + 1):
                took = {}
                for name, router in (("one", one), ("two", two))[:: 1 if turn % 2 else -1]:
                    begun = cpu(router)
                    one_client = partial(asked, router.url, stream, arguments.each)
                    with ThreadPoolExecutor(arguments.clients) as pool:
                        list(pool.map(one_client, range(arguments.clients)))
                    took[name] = (cpu(router) - begun) / (arguments.clients * arguments.each) * 1e3
                if turn:  # the first round warms up
                    ratios.append(took["two"] / took["one"])
                    costs.append((took["one"], took["two"]))
            single, pair = (statistics.median(found) for found in zip(*costs, strict=True))
            print(
                f"{'streams' if stream else 'whole replies'}: {single:.2f} ms with one worker, {pair:.2f} ms with two,"
                f" ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); aim {AIM}"
            )


if __name__ == "__main__":
    main()
