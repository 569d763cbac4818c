"""KV cache events of workers, as SGLang has them and vLLM took them over: the published batches, and the sockets for them.

`--kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'` makes a worker
publish over ZeroMQ (read off `disaggregation/kv_events.py` of SGLang 0.5.23):

- A PUB socket per data-parallel rank, on consecutive ports. A message has three frames: the topic, the batch's number (8 bytes,
  big-endian, starting at 0 in each process), and the batch.
- A batch is the msgpack array `[ts, events, attn_dp_rank]`. An event is a map whose `type` is the name of its class or, from
  older workers, an array that starts with that name.
- A ROUTER socket for replays, if there is a replay endpoint. It receives an empty frame and the number of a batch, and sends
  the batches that it still has from that number on (it keeps 10,000 by default): each an empty frame and the frames of the
  message, without the topic from older workers. The number -1 ends a replay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import msgspec

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of decoding. (`JSON_ERRORS` are these, but its module loads numpy, which `--help` is to do without.)"""

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The number that ends a replay."""


if TYPE_CHECKING:
    BlockHash: TypeAlias = int
else:
    BlockHash = int | bytes
"""A worker's own hash of a block: 64 bits, as an integer with or without a sign. It may come as bytes, see `_number`."""


def _number(own: int | bytes) -> int:
    """Return a hash as an integer. vLLM sends all of its 32 bytes with `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`.

    The integer that it sends otherwise is their end (`maybe_convert_block_hash` in `vllm/v1/core/kv_cache_utils.py`, 0.32.0).
    """
    return own if isinstance(own, int) else int.from_bytes(own[-8:], "big")


def _numbers(hashes: list[BlockHash]) -> list[BlockHash]:
    return [_number(one) for one in hashes] if bytes in set(map(type, hashes)) else hashes


class BlockStored(msgspec.Struct, tag=True):
    """Consecutive blocks were cached.

    Attributes:
        block_hashes: the worker's own hashes.
        parent_block_hash: the hash of the block that the first one continues; None at the start of a prompt.
        token_ids: the ids of all blocks. With EAGLE, each is a pair with the next id.
        block_size: ids in a block.
        medium: where the blocks are; None is the GPU.
        cache_salt: only requests with this salt share the blocks.
        lora_name: only requests with this adapter share the blocks.
        extra_keys: vLLM's form of the two, and of pictures: for each block all that tells it from others of the same ids. The
            salt stands at the first block of a prompt.
        group_idx, kv_cache_spec_kind, kv_cache_spec_sliding_window: the layers whose blocks these are, in vLLM. Layers with a
            window of so many ids, or with a state, have blocks of their own under the same hashes. Of a long prompt they keep
            only some, and `block_hashes` has no more than those.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int | tuple[int, int]]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None

    def __post_init__(self) -> None:
        self.block_hashes = _numbers(self.block_hashes)
        if self.parent_block_hash is not None:
            self.parent_block_hash = _number(self.parent_block_hash)

    @property
    def salt(self) -> str | None:
        """The salt of blocks at the start of a prompt; the blocks after them follow their parents."""
        first = self.extra_keys[0] if self.extra_keys else None
        if self.cache_salt is not None or not isinstance(first, list):
            return self.cache_salt
        names = [one for one in first if isinstance(one, str)]
        if names and names[0] == self.lora_name:
            del names[0]
        return names[-1] if names else None

    @property
    def reach(self) -> int | None:
        """How many of the blocks before a position the layers need there, by vLLM's `single_type_kv_cache_manager.py` (0.32.0).

        None is all of them, which layers with full attention need. A state needs the last one. Chunked attention needs all from
        the start of a chunk, whose size no event tells: all count for it, and for layers that are not known here.
        """
        if self.kv_cache_spec_kind is None or self.kv_cache_spec_kind in _FULL_ATTENTION:
            return None
        if self.kv_cache_spec_kind == _STATE:
            return 1
        window = self.kv_cache_spec_sliding_window
        return sys.maxsize if window is None or self.block_size < 1 else -(-(window - 1) // self.block_size)


_FULL_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention")
_STATE = "mamba"


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks of the layers `group_idx` were removed from a medium. The event says nothing about the blocks after them."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None

    def __post_init__(self) -> None:
        self.block_hashes = _numbers(self.block_hashes)


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The cache was emptied: it was flushed, or the weights changed."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KvBatch(msgspec.Struct, array_like=True):
    """The events of one step of a worker's scheduler. `ts` is the worker's clock, in seconds since the epoch."""

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
    """Bytes are not a batch of events."""


def read_batch(payload: bytes) -> KvBatch:
    """Decode a message's last frame in either of the two forms. Raise UnreadableBatchError."""
    try:
        return _decode(payload)
    except _UNREADABLE:
        try:
            return _decode_arrays(payload)
        except _UNREADABLE as error:
            raise UnreadableBatchError(f"no batch of KV events: {error}") from error


def parts(event: KvEvent, most: int) -> Iterator[KvEvent]:
    """Split an event into consecutive events of at most this many blocks."""
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) <= most:
        yield event
        return
    if isinstance(event, BlockRemoved):
        for start in range(0, len(event.block_hashes), most):
            yield msgspec.structs.replace(event, block_hashes=event.block_hashes[start : start + most])
        return
    size, parent = event.block_size, event.parent_block_hash
    for start in range(0, len(event.block_hashes), most):
        hashes = event.block_hashes[start : start + most]
        # The last part takes all remaining ids, so that it stays malformed if the event is.
        end = (start + most) * size if start + most < len(event.block_hashes) else None
        ids = event.token_ids[start * size : end]
        yield msgspec.structs.replace(event, block_hashes=hashes, parent_block_hash=parent, token_ids=ids)
        parent = hashes[-1]


class KvSource(msgspec.Struct, frozen=True):
    """Where a worker publishes.

    Attributes:
        host: the host of its URL; an IPv6 address is in brackets.
        port: the port of its first rank; further ranks use the next ports.
        ranks: the number of caches.
        replay_port: the first port for replays; None if it offers none.
    """

    host: str
    port: int
    topic: str = ""
    ranks: int = 1
    replay_port: int | None = None

    def endpoint(self, rank: int) -> str:
        return f"tcp://{self.host}:{self.port + rank}"

    def replay_endpoint(self, rank: int) -> str | None:
        return None if self.replay_port is None else f"tcp://{self.host}:{self.replay_port + rank}"


class KvReader(NamedTuple):
    """How an engine's workers tell where they publish.

    Attributes:
        paths: where to ask; the first that a worker has counts.
        source: returns where the worker at a URL publishes, by its answer; None if it does not.
    """

    paths: Sequence[str]
    source: Callable[[str, bytes], KvSource | None]


def kv_source(url: str, publisher: str, ports: tuple[int, int | None], *, topic: str, ranks: int) -> KvSource | None:
    """Return where the worker at `url` publishes; None if it does not, over TCP. `ports` are the first one, and for replays.

    The host is always the URL's: a worker binds to a wildcard, and no worker may send the router to another host.
    """
    host = urlsplit(url).hostname
    if host is None or publisher != "zmq" or ranks < 1:
        return None
    if ":" in host:
        host = f"[{host}]"
    if not 0 < ports[0] <= ports[0] + ranks - 1 <= 65535:
        return None
    return KvSource(host, ports[0], topic, ranks, ports[1])


def configured_source(
    url: str, publisher: str, endpoint: str, replay_endpoint: str | None, *, topic: str, ranks: int
) -> KvSource | None:
    """Return where the worker at `url` publishes that was started with these settings; None if it does not, over TCP."""
    port = _tcp_port(endpoint)
    return (
        None
        if port is None
        else kv_source(url, publisher, (port, _tcp_port(replay_endpoint)), topic=topic, ranks=ranks)
    )


def _tcp_port(endpoint: str | None) -> int | None:
    scheme, _, rest = (endpoint or "").partition("://")
    port = rest.rpartition(":")[2]
    return int(port) if scheme == "tcp" and port.isascii() and port.isdigit() else None
