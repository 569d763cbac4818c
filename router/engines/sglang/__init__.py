"""SGLang's JSON: requests, replies, streams, KV events. No other place knows it. Pure code, which the hub imports, too."""

from router.engines.sglang.reply import LOGPROB_FIELDS, Reply, UnreadableReplyError, edit_meta, read_reply, split_list
from router.engines.sglang.request import GenerateRequest, new_weight_version
from router.engines.sglang.stream import EventSplitter, StreamedReply, event_data, event_index

__all__ = [
    "LOGPROB_FIELDS",
    "EventSplitter",
    "GenerateRequest",
    "Reply",
    "StreamedReply",
    "UnreadableReplyError",
    "edit_meta",
    "event_data",
    "event_index",
    "new_weight_version",
    "read_reply",
    "split_list",
]
