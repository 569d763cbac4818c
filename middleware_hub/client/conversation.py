"""A conversation as text, with everything that is needed to find its tokens again.

Every turn names the reply that it continues, and the retrieval lists all replies. So a reply that the router lost makes the
sequence inexact; without the names, its text would silently count as prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from middleware_hub.client.images import Image, all_sent
from middleware_hub.client.operations import NO_PARENT, GenerateOptions, RetrieveOptions, check_options
from middleware_hub.client.wire import Reply

LONG_TOKEN = 16
"""Characters of a rewritten reply that surely hold a whole token. A parent without one in the text would count as lost."""


@dataclass
class Transcript:
    """The text and the replies of a conversation. It can be saved with a sample, and continued later, elsewhere.

    Attributes:
        text: prompt, replies and observations so far. A loop that rewrites its history may set it.
        names: the `id` of every reply, including those that the text no longer has.
        begin: the character at which the last turn begins: it may be in several pieces, if it was aborted and continued.
        prompt_chars: the length of the first prompt.
        recorded: the text up to the last reply, as the router saw both: this text is retrieved. A loop that strips its last
            reply, or ends on an observation, has another `text`, with no further sampled tokens.
        path: the replies in `recorded`: name, and the characters where each begins and ends.
        images: those of the text's placeholders, in order, as data URLs or digests. A loop that drops placeholders from `text`
            drops their images here.
        recorded_images: those of `recorded`.
    """

    text: str
    names: list[str] = field(default_factory=list)
    begin: int = -1
    prompt_chars: int = -1
    recorded: str = ""
    path: list[tuple[str, int, int]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    recorded_images: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin = len(self.text) if self.begin < 0 else self.begin
        self.prompt_chars = len(self.text) if self.prompt_chars < 0 else self.prompt_chars

    @property
    def parent(self) -> str:
        """Return the reply that the next turn continues: the last reply with whole tokens in the text."""
        kept = self._kept()
        return kept[-1][0] if kept else NO_PARENT

    def _kept(self) -> list[tuple[str, int, int]]:
        """Return the replies with whole tokens in the text, each with the end of its part there."""
        kept = _in_common(self.text, self.recorded)
        found = []
        for name, start, end in self.path:
            part, cut = self.recorded[start:kept], self.recorded[kept:end]
            # Punctuation may form one token with the line breaks after it; a word does not.
            if not cut or len(part) >= LONG_TOKEN or (not cut.strip() and any(map(str.isalnum, part))):
                found.append((name, start, min(end, kept)))
        return found

    @property
    def turn(self) -> str:
        """Return the last turn's text."""
        return self.text[self.begin :]

    @property
    def response(self) -> str:
        """Return everything after the first prompt."""
        return self.text[self.prompt_chars :]

    def take(self, reply: Reply) -> None:
        """Add a reply, as it is."""
        start = len(self.text)
        if reply.output_ids:
            self.path = self._kept()
            self.path.append((reply.id, start, start + len(reply.text)))
            self.names.append(reply.id)
        self.text += reply.text
        if reply.output_ids:
            self.recorded, self.recorded_images = self.text, list(self.images)

    def append(self, observation: str, images: Sequence[Image] = ()) -> None:
        """Add a text that was not sampled, with the images of its placeholders. The next turn begins after it."""
        self.images += all_sent(images)
        self.text += observation
        self.begin = len(self.text)

    def state(self) -> dict[str, Any]:
        """Return it as JSON values."""
        copied = {name: list(value) for name, value in vars(self).items() if isinstance(value, list)}
        return {**vars(self), **copied, "path": [list(one) for one in self.path]}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """Return the conversation from which `state` was made."""
        path = [(name, start, end) for name, start, end in state["path"]]
        copied = {name: list(value) for name, value in state.items() if isinstance(value, list)}
        return cls(**{**state, **copied, "path": path})


def _in_common(one: str, other: str) -> int:
    """Return the length of the common beginning."""
    if one.startswith(other):
        return len(other)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


class Talk:
    """The base of both conversations.

    Args:
        prompt: a text, or a transcript to take up.
        sampling_params: for every turn without its own.
        options: for every turn; `lora_path` applies to retrieval too. `images` are those of the prompt, if it is a text.
    """

    def __init__(
        self,
        prompt: str | Transcript,
        sampling_params: Mapping[str, Any] | None,
        options: GenerateOptions,
    ) -> None:
        check_options(options, GenerateOptions)
        self.transcript = Transcript(prompt) if isinstance(prompt, str) else prompt
        self.sampling_params = dict(sampling_params or {})
        self.options = options.copy()
        images: Any = self.options.pop("images", None)
        if images is not None:
            if prompt is self.transcript:
                raise ValueError("the transcript has its own `images`")
            self.transcript.images = all_sent(images)

    @property
    def text(self) -> str:
        """Return everything so far."""
        return self.transcript.text

    def append(self, observation: str, images: Sequence[Image] = ()) -> None:
        """Add a text that was not sampled, with the images of its placeholders."""
        self.transcript.append(observation, images)

    def turn_options(self, more: GenerateOptions) -> GenerateOptions:
        """Return the options of the next turn. Raises ValueError for `images`, which come with the text that they are in."""
        if "images" in more:
            raise ValueError("give the images of an observation to `append`")
        images: GenerateOptions = {"images": self.transcript.images} if self.transcript.images else {}
        return {**self.options, "parent": self.transcript.parent, **images, **more}

    def retrieval(self, options: RetrieveOptions) -> RetrieveOptions:
        """Return the options of a retrieval."""
        adapter: RetrieveOptions = {"lora_path": self.options["lora_path"]} if "lora_path" in self.options else {}
        shown = self.transcript.recorded_images if self.transcript.recorded else self.transcript.images
        images: RetrieveOptions = {"images": shown} if shown else {}
        return {**adapter, **images, **options}

    @property
    def recorded(self) -> str:
        """Return the text that is retrieved."""
        return self.transcript.recorded or self.transcript.text

    def named(self) -> dict[str, Any]:
        """Return the field that says which of several replies with this text is meant."""
        names = self.transcript.names
        return {"request_id": names[-1] if names else None}
