"""vLLM's own calls that concern all workers: sent to one of them, they would divide the fleet.

They pass unchanged. Other engines' workers do not have them. `/update_weight_version` belongs to the common form, see
`router/engines/vllm/fleet.py`.
"""

from __future__ import annotations

from msgspec.structs import replace

from router.engines.form.fleet_paths import Body, FleetPath, Query


def _mode(_: Body, query: Query) -> bool:
    return query.get("mode", "abort") == "abort"


_CALLS = (
    FleetPath("/pause", aborts=_mode, pauses=True),
    FleetPath("/resume", pauses=True, lasting=True),
    FleetPath("/abort_requests", aborts=lambda body, _: not body.get("request_ids")),
    FleetPath("/reset_prefix_cache"),
    FleetPath("/sleep", aborts=_mode, pauses=True, transfer=True),
    FleetPath("/wake_up", pauses=True, transfer=True),
    FleetPath("/init_weight_transfer_engine", transfer=True, updates=True),
    FleetPath("/start_weight_update", transfer=True, updates=True),
    FleetPath("/update_weights", transfer=True, updates=True),
    FleetPath("/finish_weight_update", transfer=True, updates=True, names_version=True),
    FleetPath("/collective_rpc", transfer=True, updates=True),
    FleetPath("/v1/load_lora_adapter", transfer=True),
    FleetPath("/v1/unload_lora_adapter", transfer=True),
)

VLLM = tuple(replace(one, engine="vllm") for one in _CALLS)
