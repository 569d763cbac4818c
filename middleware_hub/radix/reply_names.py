"""Which recorded reply has a name: the client's `rid`, or SGLang's `meta_info.id`."""

from __future__ import annotations

from middleware_hub.radix.node import Generation
from middleware_hub.spans.chain import names_of


class ReplyNames:
    """Replies by namespace and name. Of several with one name, the newest answers."""

    def __init__(self) -> None:
        self._replies: dict[tuple[str, ...], dict[str, Generation | list[Generation]]] = {}

    def add(self, generation: Generation) -> None:
        """A reply was recorded."""
        if not generation.request_ids:
            return
        replies = self._replies.setdefault(generation.namespace, {})
        for name in generation.request_ids:
            known = replies.get(name)
            if known is None:
                replies[name] = generation
            elif isinstance(known, list):
                known.append(generation)
            else:
                replies[name] = [known, generation]

    def remove(self, generation: Generation) -> None:
        """A reply is gone."""
        if not generation.request_ids:
            return
        replies = self._replies[generation.namespace]
        for name in generation.request_ids:
            known = replies[name]
            if isinstance(known, list):
                known.remove(generation)
                if len(known) == 1:
                    replies[name] = known[0]
            else:
                del replies[name]
        if not replies:
            del self._replies[generation.namespace]

    def clear(self) -> None:
        """Forget all names."""
        self._replies.clear()

    def newest(self, namespace: tuple[str, ...], request_id: str) -> Generation | None:
        """The reply with this name."""
        replies = self._replies.get(namespace, {})
        for name in names_of(request_id):
            known = replies.get(name)
            if known is not None:
                return known[-1] if isinstance(known, list) else known
        return None
