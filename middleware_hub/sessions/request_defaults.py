"""What a session's requests are completed with: the fields of `POST /sessions` that a turn may set for itself.

turn's `model` with an adapter > turn's `lora_path` > session's `model` with an adapter > session's `lora_path`
pinned `sampling_params` > turn's > session's
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from middleware_hub.chat.keys import in_other_setting
from middleware_hub.chat.messages import GRAMMARS, ChatRequest
from middleware_hub.sessions.trie.memo import WalkedMessages

_LEAST, _MOST = "min_new_tokens", "max_new_tokens"


class RequestDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """See the top of this file. As JSON, it has the names of `POST /sessions`.

    Attributes:
        sampling_params: with SGLang's names.
        pin: the names in `sampling_params` that a turn cannot set.
        model: the name that replies show, if a turn has none.
        lora_path: the adapter; None for the base model.
        match: when two messages of the session count as the same, one of `keys.NAMED`; None: as `--session-match` says.
    """

    sampling_params: dict[str, Any] = {}
    pin: tuple[str, ...] = ()
    model: str | None = None
    lora_path: str | None = None
    extra_key: str | None = None
    priority: int | None = None
    chat_template_kwargs: dict[str, Any] = {}
    match: str | None = None

    def complete(self, request: ChatRequest, adapter_of: Callable[[str], str | None]) -> ChatRequest:
        """Return a turn's request, completed with the fields that it leaves to the session.

        Its `sampling_params` are completed later (`sampling`), because they do not decide what the turn continues.

        Args:
            adapter_of: returns the adapter that a `model` names. It is asked for the session's, too: when that was made, no
                worker may have been there to say which adapters there are.
        """
        changes: dict[str, Any] = {}
        adapter = adapter_of(request.model)
        lora = (adapter_of(self.model) if self.model else None) or self.lora_path
        if request.extra or adapter or lora or self.extra_key is not None or self.priority is not None:
            extra = self._extra(request.extra, adapter, lora)
            if extra != request.extra:
                changes["extra"] = extra
        if self.chat_template_kwargs:
            changes["template"] = {**self.chat_template_kwargs, **request.template}
        if changes and isinstance(request.messages, WalkedMessages):
            request.messages.setting = in_other_setting(request.messages.setting, replace(request, **changes))
        if self.model and not request.model:
            changes["model"] = self.model
        return replace(request, **changes) if changes else request

    def _extra(self, given: Mapping[str, Raw], adapter: str | None, lora: str | None) -> Mapping[str, Raw]:
        found = dict(given)
        if adapter is not None:
            found["lora_path"] = _raw(adapter)
        for name, default in (("lora_path", lora), ("extra_key", self.extra_key), ("priority", self.priority)):
            if default is not None and name not in found:
                found[name] = _raw(default)
        if found.get("lora_path") == _NO_ADAPTER:  # engines take it for no adapter, and so do the keys
            del found["lora_path"]
        return found

    def sampling(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return `sampling_params` for a turn that sets some itself (`own`).

        Of two grammars the stronger one stays: a pinned one, else the turn's own. A limit that contradicts a pinned one is
        lowered, or raised, to that.
        """
        if not self.sampling_params:
            return dict(own)
        pinned = {name: self.sampling_params[name] for name in self.pin}
        found = {**self.sampling_params, **own, **pinned}
        for stronger in (pinned, own):
            if any(name in stronger for name in GRAMMARS):
                found = {name: value for name, value in found.items() if name not in GRAMMARS or name in stronger}
                break
        least, most = found.get(_LEAST), found.get(_MOST)
        if isinstance(least, int) and isinstance(most, int) and least > most:
            if _MOST in pinned:
                found[_LEAST] = most
            elif _LEAST in pinned:
                found[_MOST] = least
        return found


NO_DEFAULTS: Final = RequestDefaults()
_encode = msgspec.json.Encoder().encode
_NO_ADAPTER: Final = Raw(b'""')


def _raw(value: Any) -> Raw:
    return Raw(_encode(value))
