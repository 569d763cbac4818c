"""A client for trainers, agents and loops of your own. It needs aiohttp and msgspec, and loads nothing of the router's server.

from middleware_hub.client import Client, Conversation

with Client("http://127.0.0.1:30000") as client:
    talk = Conversation(client, "Question: how long is the Elbe?\\n", {"max_new_tokens": 64})
    talk.say()
    talk.append("\\nAre you sure?\\n")
    talk.say()
    found = talk.retrieve().require_exact()
"""

from middleware_hub.client.asynchronous import AsyncClient, AsyncConversation, AsyncSession
from middleware_hub.client.claims import Claim, ClaimedGroup, Sample
from middleware_hub.client.conversation import Transcript
from middleware_hub.client.errors import (
    IncompleteStreamError,
    InconsistentAnswerError,
    NotAllowedError,
    NotExactError,
    NotUsableError,
    OverloadedError,
    RefusedError,
    RouterClientError,
    UnknownReplyError,
    UnreachableError,
    WorkerFailedError,
)
from middleware_hub.client.images import Image, MultiModalData, SequenceImage, image_part
from middleware_hub.client.operations import NO_PARENT
from middleware_hub.client.scores import Scores
from middleware_hub.client.sync import Client, Conversation, Session
from middleware_hub.client.trajectory import Cover, TokenRows, TopP, Trajectory, Turn, VersionRun
from middleware_hub.client.wire import Piece, Reply, Retries

__all__ = [
    "NO_PARENT",
    "AsyncClient",
    "AsyncConversation",
    "AsyncSession",
    "Claim",
    "ClaimedGroup",
    "Client",
    "Conversation",
    "Cover",
    "Image",
    "IncompleteStreamError",
    "InconsistentAnswerError",
    "MultiModalData",
    "NotAllowedError",
    "NotExactError",
    "NotUsableError",
    "OverloadedError",
    "Piece",
    "RefusedError",
    "Reply",
    "Retries",
    "RouterClientError",
    "Sample",
    "Scores",
    "SequenceImage",
    "Session",
    "TokenRows",
    "TopP",
    "Trajectory",
    "Transcript",
    "Turn",
    "UnknownReplyError",
    "UnreachableError",
    "VersionRun",
    "WorkerFailedError",
    "image_part",
]
