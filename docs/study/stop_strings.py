"""How SGLang treats a stop string: is it always found, and is it always out of the reply's text?

Two things in SGLang 0.5.23 decide. It looks for the string in the last n + 1 tokens, n being the number of tokens of
the tokenizer's spelling: a model that spells it with more tokens is not stopped. And a request that does not stream sends
an interim result to the detokenizer every SGLANG_FORCE_STREAM_INTERVAL (50) tokens; it cannot take back
what it has sent, so a stop string around such a boundary leaves its beginning in the text (sgl-project/sglang pull request
35157). Needs a worker with the default interval.
"""

import argparse
import concurrent.futures
import functools
import json
import urllib.request
from pathlib import Path
from typing import Any

from proxy import NEVER, post
from vocabulary import Tekken, Worker

STOP = "\nObservation:"
INTERVAL = 50
WORDS = range(10, 60)
"""How many words stand in front of the stop string. The numbers take turns, so that it falls anywhere between boundaries."""
REGEX = r"[a-z]{2,7}( [a-z]{2,7}){N}\nObservation: [a-z]{4,9}"


def stream(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The last event of a streamed reply."""
    request = urllib.request.Request(
        url, json.dumps(body | {"stream": True}).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        events = [line[6:] for line in reply.read().decode().splitlines() if line.startswith("data: {")]
    last: dict[str, Any] = json.loads(events[-1])
    return last


def look(worker: Worker, reply: dict[str, Any], canonical: int) -> dict[str, bool]:
    """What happened to one reply, and what should happen by the two rules above."""
    pieces = worker.sampled(reply["output_ids"])
    start = pieces.text.find(STOP)
    assert start >= 0
    end = start + len(STOP)
    before = [0, *pieces.ends]
    spelled = sum(a < end and b > start for a, b in zip(before, pieces.ends, strict=False))
    matched = reply["meta_info"]["finish_reason"].get("matched") == STOP
    bounds = range(INTERVAL, len(pieces.ends), INTERVAL)
    return {
        "matched": matched,
        "match_expected": spelled <= canonical + 1,
        "left_in_text": matched and len(reply["text"]) > start,
        "left_expected": matched and any(start < pieces.ends[b - 1] < end for b in bounds),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", default="http://127.0.0.1:30100", help="URL of the SGLang worker")
    parser.add_argument("--model", type=Path, required=True, help="folder of the worker's model")
    parser.add_argument("--requests", type=int, default=200, help="per case")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where stop_strings.json goes")
    options = parser.parse_args()
    worker = Worker(options.model)
    canonical = len(worker.context(STOP).ends)
    results: dict[str, Any] = {
        "stop": STOP,
        "tokens_of_it": {"worker": canonical, "tekken": len(Tekken(worker).context(STOP).ends)},
    }
    cases = (("the stop string alone", [STOP], post), ("with a long second one", [STOP, NEVER], post))
    for name, stop, send in (*cases, ("the same, streamed", [STOP, NEVER], stream)):
        bodies = [
            {
                "text": "Thought:",
                "sampling_params": {
                    "max_new_tokens": 400,
                    "stop": stop,
                    "regex": REGEX.replace("N", str(WORDS[n % len(WORDS)])),
                },
            }
            for n in range(options.requests)
        ]
        one = functools.partial(send, options.worker + "/generate")
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(one, bodies))
        window = canonical if len(stop) == 1 else 10**6
        seen = [look(worker, r, window) for r in replies if STOP in worker.sampled(r["output_ids"]).text]
        results[name] = {
            "replies": len(seen),
            "stopped": sum(s["matched"] for s in seen),
            "stopped_as_expected": sum(s["matched"] == s["match_expected"] for s in seen),
            "beginning_left_in_text": sum(s["left_in_text"] for s in seen),
            "left_where_expected": sum(s["left_in_text"] and s["left_expected"] for s in seen),
            "expected_to_be_left": sum(s["left_expected"] for s in seen),
        }
        print(name, results[name], flush=True)
    (options.out / "stop_strings.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
