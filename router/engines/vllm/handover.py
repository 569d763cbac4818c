"""The two requests, one after the other, by which vLLM's workers prefill a prompt at one of them and decode it at another.

The first samples one token, which nobody needs, and keeps its cache: its reply says where, in `kv_transfer_params`. These go
into the second one unchanged. The prefill worker keeps the cache for 30 s (`kv_lease_duration`), if nobody reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from router.engines.form.worker_request import WorkerRequest
from router.engines.json import decode_object, is_list, is_null

LEASE_SECONDS = 30
_KEEP = Raw(b'{"do_remote_decode":true,"do_remote_prefill":false}')
_LEFT_OUT = frozenset({"min_new_tokens", "n"})


def prefill_body(request: WorkerRequest) -> bytes:
    """Return the request that only keeps the cache. `request` is for one sample of each prompt, and has ids."""
    raw = request.fields.get("sampling_params")
    if raw is None or is_null(raw):
        params: Any = _shortest({})
    elif is_list(raw):
        params = [_shortest(one or {}) for one in msgspec.json.decode(raw, type=list[dict[str, Raw] | None])]
    else:
        params = _shortest(decode_object(raw))
    fields = {**request.fields, "stream": Raw(b"false"), "kv_transfer_params": _KEEP}
    fields["sampling_params"] = Raw(msgspec.json.encode(params))
    return msgspec.structs.replace(request, fields=fields, stream=False, _printed=b"").body


def decode_body(request: WorkerRequest, transfers: list[Raw | None]) -> bytes:
    """Return the request that reads the caches. `transfers`: the `kv_transfer_params` of the reply to each prompt.

    It asks for no logprobs of the prompt, which its worker does not compute: vLLM 0.32.0 would return what its memory holds.
    """
    found: Any = transfers if request.batch else transfers[0]
    fields = {key: value for key, value in request.fields.items() if key != "logprob_start_len"}
    fields["kv_transfer_params"] = Raw(msgspec.json.encode(found))
    return msgspec.structs.replace(request, fields=fields, _printed=b"").body


def _shortest(params: Mapping[str, Raw]) -> dict[str, Any]:
    return {**{key: value for key, value in params.items() if key not in _LEFT_OUT}, "max_new_tokens": 1}
