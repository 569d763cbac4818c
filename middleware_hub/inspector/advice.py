"""What to do about a text that is not exact, by reason."""

from __future__ import annotations

from collections.abc import Iterable

ADVICE = {
    "retokenized": (
        "The text leaves what was recorded, and what follows was encoded from its characters.",
        "Send the reply on as it came: no strip(), no template that renders it again. If what follows is an observation that "
        "no worker was sent, nothing is wrong: it is context.",
    ),
    "cut_in_token": (
        "The text ends, or goes on, inside a sampled token, so that token was encoded again.",
        "Cut replies at stop strings that end with a token, or let the engine keep the stop string in the text "
        "(no_stop_trim).",
    ),
    "split_character": (
        "The reply begins or ends inside a character of several bytes.",
        "Nothing is lost as long as the reply is kept whole. Do not cut it at its edge.",
    ),
    "engine_mismatch": (
        "The ids that the engine sent do not spell the text that it sent with them.",
        "Compare --tokenizer-path with the tokenizer of the workers, added tokens too.",
    ),
    "version_uncertain": (
        "The weights changed while the reply was sampled, and the engine did not say where.",
        "Pause generations during an update, or use an engine that reports weight versions by token.",
    ),
    "no_logprobs": (
        "Some sampled tokens came without logprobs.",
        "Leave --force-logprobs on, or ask for logprobs in each request.",
    ),
    "multimodal": (
        "The prompt holds media, which are no text: the worker gets it unchanged, and the reply is not recorded.",
        "Take the ids from the worker's own answer (return_logprob). Sessions refuse media.",
    ),
    "unknown_parent": (
        "A request named the reply that it continues, and that reply was not known.",
        "Send x-radix-parent with the id of a reply that this router, or its store, still has: raise --radix-max-tokens, or "
        "add --store.",
    ),
    "unknown_reply": (
        "A reply that the caller lists is not in this text.",
        "Look whether the text was rebuilt from other replies, or the reply was evicted.",
    ),
    "edited_turn": (
        "A reply was changed before it was sent back.",
        "Send replies back unchanged; a summary belongs into a message of its own.",
    ),
    "template_mismatch": (
        "The context is not what the chat template renders from the messages.",
        "Look at the template for turns that it rewrites, and try --history template.",
    ),
    "store_unreachable": (
        "The store could not be asked, and may know more.",
        "Look at the store's server or disk, then ask again.",
    ),
}
"""What each reason means, and what to do about it."""

UNKNOWN = ("Something kept this from being exact.", "docs/user-guide.md has a list of reasons.")


def advice(reasons: Iterable[str]) -> list[dict[str, str]]:
    """Return what to do about each of these reasons."""
    found = []
    for reason in reasons:
        what, do = ADVICE.get(reason, UNKNOWN)
        found.append({"reason": reason, "what": what, "do": do})
    return found
