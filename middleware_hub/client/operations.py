"""The operations of a router: for each its request, and how the answer is read. The two clients share them."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from operator import index
from typing import Any, Generic, Literal, TypedDict, TypeVar
from urllib.parse import quote

from middleware_hub.client.claims import Claim, ClaimOptions
from middleware_hub.client.errors import InconsistentAnswerError, refused
from middleware_hub.client.images import Image, all_sent
from middleware_hub.client.scores import ScoreOptions, Scores, scores_of
from middleware_hub.client.trajectory import Cover, Trajectory
from middleware_hub.client.wire import ClientAnswer, ClientCall, Reply, is_saved, read_json, read_replies

T = TypeVar("T")

NO_PARENT = "none"
"""The parent of a prompt that continues nothing, although the same text was sampled before."""


Media = Literal["ref", "inline"]


@dataclass(frozen=True)
class Operation(Generic[T]):
    """A request, and the function that reads its answer."""

    call: ClientCall
    read: Callable[[ClientAnswer], T]


class GenerateOptions(TypedDict, total=False):
    """The options of a generation besides its prompt and `sampling_params`.

    Attributes:
        parent: the `id` of the reply that the prompt continues; for a batch, one for each prompt. `NO_PARENT`: no reply is
            continued.
        lora_path: the adapter.
        rid: a name of your own for the reply; for a batch, one for each prompt. Lost with `n` above 1.
        group_id: the group of its rollout; for a batch, one for each prompt, or one for all.
        group_size: how many samples the group will have.
        rollout_id: the rollout, if a loop rewrites its history; for a batch like `group_id`.
        rollout_end: whether this reply ends its rollout, so that it may be claimed without a reward.
        routing_key: the conversation or sample, for policies that keep it on one worker.
        abort_policy: `retry` or `return`, instead of the router's.
        kv_salt: `version`, `rollout` or `off`, instead of the router's.
        return_logprob: whether the reply has logprobs. The router remembers them in any case.
        return_routed_experts, return_indexer_topk, return_sampling_mask: whether the engine reports these for each token.
        return_trajectory: whether the whole sequence comes with the reply: `Reply.trajectory`.
        images: the images of the prompt's placeholders, in order: all of the conversation, every turn; for a batch, a list for
            each prompt.
        expanded: whether the ids of the prompt have a run of placeholders for each image, as sequences of trainers have.
        fields: further fields of the body, as SGLang knows them.
    """

    parent: str | Sequence[str | None] | None
    lora_path: str | None
    rid: str | Sequence[str] | None
    group_id: str | Sequence[str] | None
    group_size: int | None
    rollout_id: str | Sequence[str] | None
    rollout_end: bool
    routing_key: str | None
    abort_policy: str | None
    kv_salt: str | None
    return_logprob: bool
    return_routed_experts: bool
    return_indexer_topk: bool
    return_sampling_mask: bool
    return_trajectory: bool
    images: Sequence[Image] | Sequence[Sequence[Image]]
    expanded: bool
    fields: Mapping[str, Any]


class RetrieveOptions(TypedDict, total=False):
    """The options of a retrieval: the fields of `/retrieve_from_text`.

    Attributes:
        images: the images of the text's placeholders, in order.
        media: `inline`: the images of the sequence come with their bytes (default: `ref`, without).
    """

    images: Sequence[Image]
    media: Media
    strict: bool
    max_staleness: int | None
    kv_staleness: bool
    lora_path: str | None
    return_routed_experts: bool
    return_indexer_topk: bool
    return_top_p: bool


class ExportOptions(TypedDict, total=False):
    """How a session is exported: the fields of `finalize`. `media` is as in `RetrieveOptions`; `score`: who scores, too."""

    media: Media
    expect_request_ids: Sequence[str] | None
    shared_turns: str
    roots: str
    export_all_checkpoints: bool
    score: ScoreOptions | None


class SessionOptions(TypedDict, total=False):
    """The fields of a new session, and its group; see the HTTP API."""

    session_id: str | None
    sampling_params: Mapping[str, Any] | None
    pin: Sequence[str] | None
    model: str | None
    lora_path: str | None
    extra_key: str | None
    priority: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    metadata: Mapping[str, Any] | None
    ttl_s: float | None
    response_budget: int | None
    as_key: bool | None
    group_id: str | None
    group_size: int | None


Prompt = str | Sequence[int]
"""A text, or ids: a list, or an array of integers."""


def check_options(given: Iterable[str], kind: Any) -> None:
    """Raise TypeError, as Python does for its own arguments, for a name that is no key of `kind`, a TypedDict.

    Otherwise a misspelt name would have no effect: a misspelt `group_size`, for example, leaves a group incomplete for ever.
    """
    known = kind.__required_keys__ | kind.__optional_keys__
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}"
            raise TypeError(f"there is no option {name!r}: {hint}")


def generate(prompt: Prompt, sampling: Mapping[str, Any] | None, options: GenerateOptions) -> Operation[Reply]:
    call = _generate_call([prompt], sampling, 1, options, single=True)
    return Operation(call, lambda answer: read_replies(read_json(call, answer), 1, 1, answer.headers)[0][0])


def generate_batch(
    prompts: Sequence[Prompt], sampling: Mapping[str, Any] | None, n: int, options: GenerateOptions
) -> Operation[list[list[Reply]]]:
    call = _generate_call(prompts, sampling, n, options, single=False)
    return Operation(call, lambda answer: read_replies(read_json(call, answer), len(prompts), n, answer.headers))


def stream(prompt: Prompt, sampling: Mapping[str, Any] | None, options: GenerateOptions) -> ClientCall:
    call = _generate_call([prompt], sampling, 1, options, single=True)
    # Without logprobs, some streams of SGLang can be read in two ways.
    return replace(call, body={**(call.body or {}), "stream": True, "return_logprob": True})


def _generate_call(
    prompts: Sequence[Prompt], sampling: Mapping[str, Any] | None, n: int, options: GenerateOptions, *, single: bool
) -> ClientCall:
    check_options(options, GenerateOptions)
    if not len(prompts) or not all(len(prompt) for prompt in prompts):
        raise ValueError("a prompt is empty")
    kinds = {isinstance(prompt, str) for prompt in prompts}
    if len(kinds) != 1:
        raise ValueError("a batch has texts or ids, not both")
    params = dict(sampling or {})
    if (n != 1 or "n" in params) and params.setdefault("n", n) != n:
        raise ValueError(f"`sampling_params` has n={params['n']}: say it as the argument `n`")
    values = list(prompts) if kinds == {True} else [_ids(prompt) for prompt in prompts]
    body: dict[str, Any] = {"text" if kinds == {True} else "input_ids": values[0] if single else values}
    body["sampling_params"] = params
    images: Any = options.get("images")
    if images is not None:
        if single:
            body["image_data"] = all_sent(images)
        elif len(images) != len(prompts):
            raise ValueError(
                f"{len(images)} lists of images for {len(prompts)} prompts: give one for each, [] for none"
            )
        else:
            body["image_data"] = [all_sent(one) for one in images]
    for name in ("lora_path", "rid"):
        if options.get(name) is not None:
            body[name] = options.get(name)
    for name, value in options.items():
        if name.startswith("return_") and value:
            body[name] = True
    body.update(options.get("fields") or {})
    headers = {}
    if options.get("routing_key"):
        headers["x-smg-routing-key"] = str(options.get("routing_key"))
    if options.get("abort_policy"):
        headers["x-abort-policy"] = str(options.get("abort_policy"))
    if options.get("kv_salt"):
        headers["x-kv-salt"] = str(options.get("kv_salt"))
    for name in ("group_id", "rollout_id"):
        given: Any = options.get(name)
        if given is not None:
            headers[f"x-{name.replace('_', '-')}"] = given if isinstance(given, str) else ", ".join(given)
    if options.get("group_size") is not None:
        headers["x-group-size"] = str(options.get("group_size"))
    if options.get("expanded"):
        headers["x-radix-media"] = "expanded"
    if options.get("rollout_end"):
        headers["x-rollout-end"] = "true"
    parent = options.get("parent")
    if isinstance(parent, str):
        headers["x-radix-parent"] = parent
    elif parent is not None:
        if len(parent) != len(prompts):
            raise ValueError(f"{len(parent)} parents for {len(prompts)} prompts: name one for each, or None")
        headers["x-radix-parent"] = ", ".join(name or "" for name in parent)
    return ClientCall("POST", "/generate", body, headers, samples=True)


def _ids(prompt: Sequence[Any]) -> list[int]:
    return [index(one) for one in prompt]  # an array's integers are none of JSON's


def retrieve(
    text: str, names: Sequence[str] | None, request_id: str | None, options: RetrieveOptions
) -> Operation[Trajectory]:
    call = _retrieve_call(text, names, request_id, options)
    return Operation(call, lambda answer: _built(call, answer, Trajectory.of))


def cover(text: str, names: Sequence[str], request_id: str | None, options: RetrieveOptions) -> Operation[Cover]:
    call = _retrieve_call(text, names, request_id, options, cover=True)

    def built(found: Mapping[str, Any]) -> Cover:
        return Cover(tuple(Trajectory.of(one) for one in found["trajectories"]), tuple(found["missing"]))

    return Operation(call, lambda answer: _built(call, answer, built))


def _retrieve_call(
    text: str, names: Sequence[str] | None, request_id: str | None, options: RetrieveOptions, **more: Any
) -> ClientCall:
    check_options(options, RetrieveOptions)
    given = {name: value for name, value in options.items() if value is not None and name not in ("images", "media")}
    body = {"text": text, **_image_data(options.get("images")), **more, **given}
    if names is not None:
        body["expect_request_ids"] = list(names)
    if request_id is not None:
        body["request_id"] = request_id
    return ClientCall("POST", "/retrieve_from_text" + _media_query(options.get("media")), body, again=True)


def _image_data(images: Sequence[Image] | None) -> dict[str, Any]:
    return {} if images is None else {"image_data": all_sent(images)}


def _media_query(kind: str | None) -> str:
    return "" if kind is None else f"?media={quote(kind)}"


def explain(text: str, images: Sequence[Image] | None = None) -> Operation[dict[str, Any]]:
    return plain(ClientCall("POST", "/radix_tree/explain", {"text": text, **_image_data(images)}, again=True))


def media(digest: str) -> Operation[bytes]:
    call = ClientCall("GET", f"/media/{quote(digest, safe=':')}", again=True)

    def read(answer: ClientAnswer) -> bytes:
        if answer.status not in call.accepts:
            read_json(call, answer)  # raises its error
        return answer.content

    return Operation(call, read)


def plain(call: ClientCall) -> Operation[dict[str, Any]]:
    """Return an operation whose answer is a JSON object, returned unchanged."""
    return _operation(call, lambda found: dict(found))


def _operation(call: ClientCall, build: Callable[[Any], T]) -> Operation[T]:
    """Return an operation whose answer is read by `build`."""
    return Operation(call, lambda answer: _built(call, answer, build))


def to_workers(path: str, body: Mapping[str, Any]) -> Operation[dict[str, Any]]:
    """Return a call to all workers. Its answer 207, which means that some workers failed, becomes an error."""
    call = ClientCall("POST", path, body, accepts=frozenset({200, 207}))

    def read(answer: ClientAnswer) -> dict[str, Any]:
        found: dict[str, Any] = read_json(call, answer)
        if answer.status == 207:
            advice = "look at each worker's answer in `details['workers']`; they may be at different versions now"
            raise refused(207, {"type": "workers_differ", **found, "message": f"{found.get('message')} - {advice}"})
        return found

    return Operation(call, read)


# -- groups ------------------------------------------------------------------------------------------------------------


def claim(options: ClaimOptions) -> Operation[Claim]:
    """Return a claim. It may be sent again: the samples of a lost answer come back when its lease is over."""
    check_options(options, ClaimOptions)
    call = ClientCall("POST", "/trajectories/claim", dict(options), again=True)
    return _operation(call, Claim.of)


def settle(what: str, claimed: Claim | str, **more: Any) -> Operation[dict[str, Any]]:
    """Return `ack`, `release` or `renew`; sent twice it has the effect of once. Raises ValueError for an empty claim."""
    name = claimed if isinstance(claimed, str) else claimed.id
    if name is None:
        raise ValueError("there was nothing to claim, so there is nothing to settle: look at len(claim)")
    return plain(ClientCall("POST", f"/trajectories/{what}", {"claim_id": name, **more}, again=True))


def reward(request_id: str, value: float | None, info: Mapping[str, Any] | None) -> Operation[bool]:
    """Return a reward, which may be of any type that makes a float. Raises ValueError if it is not finite."""
    if value is not None:
        value = finite({"reward": float(value)})["reward"]
    return rewards(
        [{"request_id": request_id, "reward": value, **({} if info is None else {"reward_info": finite(info)})}]
    )


def finite(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return fields of a reward. Raises ValueError for a number that JSON does not have: it would be sent as null."""
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"`{name}` is {value}: a reward must be a finite number")
    return fields


def rewards(given: Sequence[Mapping[str, Any]]) -> Operation[bool]:
    """Return several rewards: all of them count, or none. The result says whether the store has them."""
    return _saved(ClientCall("POST", "/trajectories/reward", {"rewards": [dict(one) for one in given]}, again=True))


def score_sequences(
    sequences: Sequence[Sequence[int]], starts: Sequence[int] | None, options: ScoreOptions
) -> Operation[list[dict[str, Scores]]]:
    """Return the scores of ids; sent again after an error, it goes on where it stopped. Raises ValueError."""
    check_options(options, ScoreOptions)
    begins = [1] * len(sequences) if starts is None else [index(one) for one in starts]
    if len(begins) != len(sequences):
        raise ValueError(f"{len(begins)} starts for {len(sequences)} sequences: give one for each")
    given = [{"input_ids": _ids(ids), "start": start} for ids, start in zip(sequences, begins, strict=True)]
    call = ClientCall("POST", "/trajectories/score", {"sequences": given, **options}, again=True)
    ends = [len(ids) for ids in sequences]

    def read(found: Mapping[str, Any]) -> list[dict[str, Scores]]:
        rows = zip(found["sequences"], begins, ends, strict=True)
        return [scores_of(told, start, end) for told, start, end in rows]

    return _operation(call, read)


def score_session(session_id: str, roots: str, options: ScoreOptions) -> Operation[tuple[Trajectory, ...]]:
    """Return the trajectories of a session with their scores; sent again after an error, it goes on where it stopped."""
    check_options(options, ScoreOptions)
    call = ClientCall("POST", "/trajectories/score", {"session_id": session_id, "roots": roots, **options}, again=True)
    return _operation(call, lambda found: tuple(Trajectory.of_branch(one) for one in found["trajectories"]))


def _saved(call: ClientCall) -> Operation[bool]:
    """Return a call whose result says whether the store has its content."""

    def read(answer: ClientAnswer) -> bool:
        read_json(call, answer)
        return is_saved(answer.headers)

    return Operation(call, read)


# -- sessions ----------------------------------------------------------------------------------------------------------


def create_session(options: SessionOptions) -> Operation[dict[str, Any]]:
    check_options(options, SessionOptions)
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    headers = {
        f"x-group-{name}": str(given.pop(f"group_{name}")) for name in ("id", "size") if f"group_{name}" in given
    }
    # With a name that the router chooses, a session made twice by accident would only be an unused session.
    return plain(
        ClientCall("POST", "/sessions", given, headers, again="session_id" not in given, accepts=frozenset({201}))
    )


def chat(session_id: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Operation[dict[str, Any]]:
    """Return a turn. It may be sent again: the router knows it by its key, and samples once."""
    path = f"/sessions/{session_id}/v1/chat/completions"
    return plain(ClientCall("POST", path, body, {"idempotency-key": uuid.uuid4().hex, **headers}, again=True))


def in_session(
    method: str, session_id: str, place: str = "", body: Mapping[str, Any] | None = None
) -> Operation[dict[str, Any]]:
    """Return a call of a session that may be repeated: its second answer is the first one."""
    return plain(ClientCall(method, f"/sessions/{session_id}{place}", body, again=True))


def delete_session(session_id: str) -> Operation[dict[str, Any]]:
    """Return the end of a session. A missing session is no error: a first answer may have been lost."""
    return plain(ClientCall("DELETE", f"/sessions/{session_id}", again=True, accepts=frozenset({200, 404})))


def reward_session(session_id: str, info: Mapping[str, Any], branch: str | None) -> Operation[bool]:
    """Return the reward of a session or a branch. Raises ValueError as `reward` does."""
    body = {"reward_info": finite(info), **({} if branch is None else {"branch": branch})}
    return _saved(in_session("POST", session_id, "/reward_info", body).call)


def complete_session(session_id: str, info: Mapping[str, Any] | None) -> Operation[bool]:
    """Return the end of an agent's work. Raises ValueError as `reward` does."""
    return _saved(
        in_session("POST", session_id, "/complete", {} if info is None else {"reward_info": finite(info)}).call
    )


def trajectories(session_id: str, *, export_all_checkpoints: bool) -> Operation[tuple[Trajectory, ...]]:
    query = "?export_all_checkpoints=true" if export_all_checkpoints else ""
    call = in_session("GET", session_id, f"/trajectories{query}").call
    return _operation(call, lambda found: tuple(Trajectory.of_branch(one) for one in found["trajectories"]))


def finalize(session_id: str, options: ExportOptions) -> Operation[Cover]:
    check_options(options, ExportOptions)
    check_options(options.get("score") or (), ScoreOptions)
    body = {name: value for name, value in options.items() if value is not None and name != "media"}
    path = f"/sessions/{session_id}/finalize{_media_query(options.get('media'))}"
    call = ClientCall("POST", path, body, again=True)

    def built(found: Mapping[str, Any]) -> Cover:
        trajectories = tuple(Trajectory.of_branch(one) for one in found["trajectories"])
        return Cover(trajectories, tuple(found.get("missing") or ()))

    return Operation(call, lambda answer: _built(call, answer, built))


def _built(call: ClientCall, answer: ClientAnswer, build: Callable[[Any], T]) -> T:
    found = read_json(call, answer)
    try:
        return build(found)
    except (KeyError, TypeError, ValueError) as error:
        raise InconsistentAnswerError(
            f"the answer of {call.path} has another shape ({error!r}): {json.dumps(found)[:300]}: the router's version does "
            "not fit this client's"
        ) from error
