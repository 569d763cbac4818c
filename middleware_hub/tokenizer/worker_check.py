"""Whether a worker has the router's tokenizer: both encode one text.

With another tokenizer no reply is exact, and an id that the model lacks ends an SGLang worker. Both engines encode texts at
`/tokenize` (`sglang/srt/entrypoints/openai/serving_tokenize.py`, `vllm/entrypoints/serve/tokenize`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.engines.engine import EngineCall
from router.engines.json import JSON_ERRORS
from router.workers.worker import WorkerCheck

TEXT: Final = (
    "The 1,234 quick brown foxes' naïve café: 北京大学, привет, 🙂👍\n\n\tdef f(x):  return x**2 # <think>\n</think>\n\n"
    "<|im_end|>\n<|im_start|>user\n</s><|eot_id|>"
)
"""Words of several scripts, and tokens by which tokenizers of one family differ."""


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_decode = msgspec.json.Decoder(_Tokenized).decode


def tokenizer_check(tokenizer: Tokenizer, path: str) -> WorkerCheck:
    """Return the question. `path` is the path of the router's tokenizer."""

    def judge(answer: bytes) -> str | None:
        try:
            found = _decode(answer).tokens
        except JSON_ERRORS:
            return None
        ids = tokenizer.encode_start(TEXT)
        if found in (ids, ids[len(tokenizer.bos) :]):
            return None
        return (
            f"it encodes a text otherwise than --tokenizer-path {path}. Its replies will not be exact, and prompts can"
            " have ids outside of its vocabulary: start the router with the tokenizer of this worker's model"
        )

    body = msgspec.json.encode({"prompt": TEXT, "add_special_tokens": False})
    return WorkerCheck(EngineCall("POST", "/tokenize", body), judge)
