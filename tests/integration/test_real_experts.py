"""A real mixture of experts without a GPU: the rows that are retrieved are those that the engine said."""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import sglang_server
from tests.support.client import call
from tests.support.programs import Program

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

LAYERS, EXPERTS, ASKED = 2, 4, 2
_ON_A_CPU = """
# SGLang 0.5.23 hands the memory for the rows to CUDA, also on a CPU: here it is memory as any other.
import importlib.util
import sys

NAME = "sglang.srt.mem_cache.pool_host.common"


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module):
            load(module)
            module._cuda_host_register = module._cuda_host_unregister = lambda *_, **__: None

        spec.loader.exec_module = loaded
        return spec


sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """An engine with such a model, and the model's folder."""
    if not sglang_server.is_installed():
        pytest.skip(f"no SGLang in {sglang_server.sglang_dir()}: run tests/sglang_cpu/setup.sh")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_ON_A_CPU)
    model = tmp_path / "model"
    python = sglang_server.sglang_dir() / "venv" / "bin" / "python"
    make = sglang_server.SETUP.with_name("make_model.py")
    subprocess.run([python, make, model, "16", str(EXPERTS)], check=True, capture_output=True)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    flags = ["--model-path", str(model), "--enable-return-routed-experts", "--mem-fraction-static", "0.9"]
    with sglang_server.sglang_servers([flags], log_dir=tmp_path) as (server,):
        monkeypatch.undo()
        yield server.url, model


def test_the_rows_of_a_conversation_are_those_of_the_engine(worker: tuple[str, Path], tmp_path: Path) -> None:
    """The engine says a row for each token but the last, of the whole sequence; retrieval joins those of all turns."""
    url, model = worker
    with Program("router", "--tokenizer-path", str(model), "--worker-urls", url, folder=tmp_path) as router:
        router.wait_until_up()
        text, names = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", list[str]()
        for number in range(3):
            names.append(f"r{number}")
            answer = call(
                f"{router.url}/generate",
                {
                    "text": text,
                    "rid": names[-1],
                    "return_routed_experts": True,
                    "sampling_params": {"max_new_tokens": 7, "ignore_eos": True},
                },
                headers={"x-radix-parent": names[-2]} if number else {},
            )
            assert answer.status == 200, answer.content
            reply = answer.json()
            text += reply["text"]
            asked = {"text": text, "expect_request_ids": names, "return_routed_experts": True}
            found = call(f"{router.url}/retrieve_from_text", asked).json()
            rows = found["routed_experts"]
            assert (found["exact"], found["reasons"]) == (True, [])
            assert (rows["dtype"], rows["shape"]) == ("int32", [found["token_length"] - 1, LAYERS * ASKED])
            assert [one["request_id"] for one in rows["told"]] == names
            assert base64.b64decode(rows["base64"]) == base64.b64decode(reply["meta_info"]["routed_experts"])
            text += "<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
