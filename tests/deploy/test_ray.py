"""The recipe of docs/ray.md as it stands, on a Ray cluster of two nodes: a router each, over one store."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.redis_server import redis_server
from worker.models.ngram import shipped_tokenizer
from worker.worker import EmbeddedWorker

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BEFORE = """
import os, signal
from ray.cluster_utils import Cluster
import ray
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
cluster.add_node(num_cpus=2)
ray.init(address=cluster.address, logging_level="error", include_dashboard=False)
"""
QUIET = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
AFTER = """
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as At

first, second = urls
assert urls[first] != urls[second], urls
text = "Question: How many plays did Shakespeare write?"
for number in range(6):
    text = ray.get(turn.options(scheduling_strategy=At((first, second)[number % 2], soft=False)).remote(text)) + "\\n"
    if number == 2:  # a router dies, and an actor
        actor = ray.get_actor(f"tito-router-{second}")
        ray.get(actor.__ray_call__.remote(lambda self: (self.process.kill(), self.process.wait())))
        assert ray.get(actor.url.remote()) == urls[second]
        ray.kill(ray.get_actor(f"tito-router-{first}"), no_restart=False)
found = [ray.get(sample.options(scheduling_strategy=At(node, soft=False)).remote(text)) for node in urls]
assert found[0]["tokens"] == found[1]["tokens"]
assert found[0]["loss_mask"] == found[1]["loss_mask"]
assert len(found[0]["turns"]) == 6, found[0]["turns"]
again = start_routers(FLAGS)
assert again.keys() == urls.keys(), "whoever calls it again gets the same"
urls = again  # the one whose actor died has another port
urllib.request.urlopen(urllib.request.Request(f"{urls[first]}/add_worker?url={LATER}", method="POST"))
with urllib.request.urlopen(f"{urls[second]}/list_workers") as listed:
    assert LATER in json.load(listed)["urls"], "an engine that was added at the other router"
for node in urls:
    assert ray.get(ray.get_actor(f"tito-router-{node}").stop.remote()) == 0
print("six turns at two nodes, one conversation")
ray.shutdown()
cluster.shutdown()
"""


def test_two_nodes_serve_one_conversation_though_routers_die(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "ray.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    tokenizer = shipped_tokenizer()
    with EmbeddedWorker(tokenizer) as worker, EmbeddedWorker(tokenizer) as later, redis_server(tmp_path) as redis:
        named = f"""
TOKENIZER, STORE, ENGINES = {str(tokenizer)!r}, {redis.address!r}, [{worker.url!r}]
LATER = {later.url!r}
"""
        program = tmp_path / "recipe.py"
        program.write_text("\n".join([BEFORE, named, *blocks, AFTER]))
        done = subprocess.run(
            [sys.executable, str(program)], cwd=ROOT, capture_output=True, text=True, timeout=240, env=QUIET
        )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "six turns at two nodes" in done.stdout
