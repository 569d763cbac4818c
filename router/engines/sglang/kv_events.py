"""What SGLang says about its KV cache: the batches that it publishes, and where.

`--kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'` makes a worker
publish over ZeroMQ (read off `disaggregation/kv_events.py` of SGLang 0.5.23):

- PUB socket, one per data-parallel rank, each on the port behind the one before. A message has three frames: the topic, the
  batch's number (8 bytes, big-endian, from 0 in each process), the batch.
- A batch is the msgpack array `[ts, events, attn_dp_rank]`. An event is a map whose `type` is the name of its class, or, from
  older workers, an array that begins with that name.
- ROUTER socket, if there is a replay endpoint: it is sent an empty frame and the number of a batch, and answers with what it
  still has from that one on (the last 10,000 by default): an empty frame and the frames of the message, of which older ones
  leave out the topic. Behind the last one comes the number -1.
- `GET /server_info` has `kv_events`, which tells ports, topic and block size; where it is missing, the flag itself tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias
from urllib.parse import urlsplit

import msgspec

from router.engines.sglang.json import JSON_ERRORS

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The number behind the last batch of a replay."""


class BlockStored(msgspec.Struct, tag=True):
    """Blocks are in the cache from now on, one behind the other.

    Attributes:
        block_hashes: the worker's own, signed 64-bit numbers.
        parent_block_hash: of the block that the first one continues; None at the beginning of a prompt.
        token_ids: of all blocks together. With EAGLE each is a pair with the id behind it.
        block_size: ids in a block.
        medium: where it is; None is the GPU.
        cache_salt: whose blocks they are, if they are not everybody's.
        lora_name: of an adapter.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int | tuple[int, int]]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """These blocks are gone from a medium. Nothing is said of those behind them."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The cache is empty: it was flushed, or the weights changed."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KvBatch(msgspec.Struct, array_like=True):
    """What happened in one step of a worker's scheduler. `ts` is its clock, in seconds of the epoch."""

    ts: float
    events: Sequence[KvEvent]
    attn_dp_rank: int | None = None


class _StoredArray(BlockStored, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(BlockRemoved, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(AllBlocksCleared, tag="AllBlocksCleared", array_like=True):
    pass


class _ArrayBatch(KvBatch):
    events: Sequence[_StoredArray | _RemovedArray | _ClearedArray]


_decode = msgspec.msgpack.Decoder(KvBatch).decode
_decode_arrays = msgspec.msgpack.Decoder(_ArrayBatch).decode


class UnreadableBatchError(Exception):
    """Bytes that are no batch of events."""


def read_batch(payload: bytes) -> KvBatch:
    """A batch out of a message's last frame, in either of the two forms. UnreadableBatchError."""
    try:
        return _decode(payload)
    except JSON_ERRORS:
        try:
            return _decode_arrays(payload)
        except JSON_ERRORS as error:
            raise UnreadableBatchError(f"no batch of KV events: {error}") from error


def parts(event: KvEvent, most: int) -> Iterator[KvEvent]:
    """The same event as several ones of no more than so many blocks, to be taken one after the other."""
    if not isinstance(event, BlockStored) or len(event.block_hashes) <= most:
        yield event
        return
    size, parent = event.block_size, event.parent_block_hash
    for start in range(0, len(event.block_hashes), most):
        hashes = event.block_hashes[start : start + most]
        # What is too much or too little stays in the last part.
        end = (start + most) * size if start + most < len(event.block_hashes) else None
        ids = event.token_ids[start * size : end]
        yield msgspec.structs.replace(event, block_hashes=hashes, parent_block_hash=parent, token_ids=ids)
        parent = hashes[-1]


class KvSource(msgspec.Struct, frozen=True):
    """Where a worker publishes.

    Attributes:
        host: of its URL; an IPv6 address in brackets.
        port: of its first rank; each further rank has the next one.
        ranks: how many caches it has.
        replay_port: the same for replays; None where it offers none.
    """

    host: str
    port: int
    topic: str = ""
    ranks: int = 1
    replay_port: int | None = None

    def endpoint(self, rank: int) -> str:
        """Of the batches of a rank."""
        return f"tcp://{self.host}:{self.port + rank}"

    def replay_endpoint(self, rank: int) -> str | None:
        """Of a rank's replays, if it offers any."""
        return None if self.replay_port is None else f"tcp://{self.host}:{self.replay_port + rank}"


class _Published(msgspec.Struct):
    publisher: str
    endpoint_port_base: int
    topic: str = ""
    dp_size: int = 1
    replay_endpoint_port_base: int | None = None


class _ServerInfo(msgspec.Struct):
    kv_events: _Published | None = None
    kv_events_config: str | None = None
    dp_size: int = 1


class _Flag(msgspec.Struct):
    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""


def kv_source(url: str, server_info: bytes) -> KvSource | None:
    """Where the worker at `url` publishes, by its own answer to `GET /server_info`. None if it does not, over TCP.

    It is always the URL's host: what a worker binds to is a wildcard, and no worker may send us anywhere else.
    """
    host = urlsplit(url).hostname
    if host is None:
        return None
    if ":" in host:
        host = f"[{host}]"
    try:
        info = msgspec.json.decode(server_info, type=_ServerInfo)
        told = info.kv_events or _from_flag(info)
    except JSON_ERRORS:
        return None
    if told is None or told.publisher != "zmq" or told.dp_size < 1:
        return None
    last = told.endpoint_port_base + told.dp_size - 1
    if not 0 < told.endpoint_port_base <= last <= 65535:
        return None
    return KvSource(host, told.endpoint_port_base, told.topic, told.dp_size, told.replay_endpoint_port_base)


def _from_flag(info: _ServerInfo) -> _Published | None:
    """Where there is no description, as from older workers: the flag's own text, which is one of the server's arguments."""
    if not info.kv_events_config:
        return None
    flag = msgspec.json.decode(info.kv_events_config, type=_Flag)
    port = _tcp_port(flag.endpoint)
    if port is None:
        return None
    return _Published(flag.publisher, port, flag.topic, info.dp_size, _tcp_port(flag.replay_endpoint))


def _tcp_port(endpoint: str | None) -> int | None:
    scheme, _, rest = (endpoint or "").partition("://")
    port = rest.rpartition(":")[2]
    return int(port) if scheme == "tcp" and port.isascii() and port.isdigit() else None
