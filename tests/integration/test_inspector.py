"""The inspector's API over HTTP: its numbers are those of a retrieval and of an export, for whoever may see them."""

from __future__ import annotations

import io
import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pyarrow.parquet
import pytest

from middleware_hub.inspector.reports import files
from middleware_hub.store.sqlite.file import connect
from router.config import StoreConfig
from tests.support import templates
from tests.support.agents import AgentSession, system, user
from tests.support.asking import until
from tests.support.client import Answer
from tests.support.stack import Stack, stack
from tests.support.usual import usual
from tests.support.vocabularies import Name

API = "/inspect/api"
WORDS = (
    "forty-two",
    " naïve café",
    " 你好",
    " 🙂👍🏽",
    "\n\n",
    " the answer",
    "<b>&",
    " </script>",
    "  ",
    "שלום",
    " x = 1;",
)


@dataclass
class Look:
    """An inspector as a client sees it."""

    stack: Stack
    headers: dict[str, str] = field(default_factory=dict)

    def ask(self, path: str, **query: Any) -> Answer:
        return self.stack.exchange("GET", f"{API}{path}?{urlencode(query)}", headers=self.headers)

    def get(self, path: str, **query: Any) -> Any:
        answer = self.ask(path, **query)
        assert answer.status == 200, answer.content
        return answer.json()

    def all(self, **query: Any) -> list[dict[str, Any]]:
        """The whole list, page by page."""
        found, cursor = [], ""
        while cursor is not None:
            page = self.get("/conversations", cursor=cursor, **query)
            found += page["conversations"]
            cursor = page["next"]
        return found

    def branch(self, conversation: str, branch: str, place: str = "", **query: Any) -> Any:
        return self.get(path_of(conversation, branch) + place, **query)

    def until_drift(self, conversation: str, branch: str) -> Any:
        """The head of a branch, with its drift."""
        return until_known(lambda: self.branch(conversation, branch))


def until_known(look: Any) -> Any:
    head: Any = None

    def known() -> bool:
        nonlocal head
        head = look()
        return head["drift"] is not None

    until(known, "the drift comes")
    return head


def path_of(conversation: str, branch: str = "") -> str:
    path = f"/conversations/{quote(conversation, safe='')}"
    return f"{path}/branches/{quote(branch, safe='')}" if branch else path


def pieces_of(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randrange(1, 6)))


class Talks:
    """Conversations that were played, as their clients know them: the whole text of each reply by its request id."""

    def __init__(self, made: Stack, seed: int, prefix: str) -> None:
        self.stack = made
        self.rng = random.Random(seed)
        self.prefix = prefix
        self.texts: dict[str, str] = {}
        self.above: dict[str, str | None] = {}

    def play(self, count: int, **body: Any) -> None:
        """Some generations, each a start, or behind any earlier reply. Replies are spelled in odd ways."""
        rng, spelling = self.rng, self.stack.spelling
        for number in range(count):
            rid = f"{self.prefix}{number}"
            above = rng.choice([None, *self.texts]) if self.texts else None
            text = f"{self.prefix} says: " if above is None else self.texts[above]
            text += pieces_of(rng) if above is None or rng.random() < 0.8 else ""
            reply = pieces_of(rng)
            cut = rng.randrange(len(reply) + 1)
            ids = spelling.encode_tail(reply[:cut]) + spelling.encode_tail(reply[cut:])
            self.stack.workers[0].script(ids, finish=rng.choice(["eos", "length"]))
            if rng.random() < 0.2:
                self.stack.set_weight_version(f"{self.prefix}{number}")
            found = self.stack.generate({"text": text, "rid": rid, **body})
            self.texts[rid] = text + found.body["text"]
            self.above[rid] = above


@pytest.fixture(scope="module", params=usual(["qwen", "mistral-v1", "tekken"], "mistral-v1"))
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Stack, Talks]]:
    """A router that has talked, for each kind of vocabulary."""
    name: Name = request.param
    with stack(name, styles=("incremental",)) as made:
        talks = Talks(made, 1, "q")
        talks.play(40)
        yield made, talks


def branches(look: Look) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for one in look.all():
        for branch in look.get(path_of(one["id"]))["branches_list"]:
            yield one, branch


def whole(look: Look, conversation: str, branch: str, size: int = 5_000) -> dict[str, Any]:
    """All tokens of a branch, out of windows."""
    found: dict[str, Any] = {"bytes": {}, "special": []}
    at, total = 0, 1
    while at < total:
        window = look.branch(conversation, branch, "/tokens", start=at, end=at + size)
        total = window["total"]
        assert (window["start"], window["end"]) == (at, min(at + size, total))
        for name in ("ids", "texts", "mask", "logprobs", "versions", "turns"):
            assert len(window[name]) == window["end"] - at
            found.setdefault(name, []).extend(window[name])
        found["bytes"].update(window["bytes"])
        found["special"] += window["special"]
        at = window["end"]
    return found


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_branch_is_what_a_retrieval_answers(served: tuple[Stack, Talks]) -> None:
    made, talks = served
    look = Look(made)
    seen = 0
    for one, branch in branches(look):
        truth = made.retrieve(talks.texts[branch["id"]], request_id=branch["id"])
        head = look.branch(one["id"], branch["id"])
        tokens = whole(look, one["id"], branch["id"])
        assert tokens["ids"] == truth["tokens"]
        assert tokens["mask"] == truth["loss_mask"]
        assert [0.0 if value is None else value for value in tokens["logprobs"]] == truth["rollout_logp"]
        assert [value is None for value in tokens["logprobs"]] == [not mask for mask in truth["loss_mask"]]
        assert (head["total"], head["exact"], head["reasons"]) == (
            truth["token_length"],
            truth["exact"],
            truth["reasons"],
        )
        sampled = [turn for turn in head["turns"] if turn["sampled"]]
        assert [{name: turn[name] for name in truth["turns"][0]} for turn in sampled] == truth["turns"]
        assert [part["start"] for part in head["turns"]] == [0, *(part["end"] for part in head["turns"][:-1])]
        versions = [None if at < 0 else head["versions"][at] for at in tokens["versions"]]
        expected: list[str | None] = [None] * head["total"]
        for run in truth["weight_versions"]:
            expected[run["start"] : run["end"]] = [run["version"]] * (run["end"] - run["start"])
        assert versions == expected
        turns = [at for at, turn in enumerate(head["turns"]) for _ in range(turn["start"], turn["end"])]
        assert tokens["turns"] == turns
        assert branch["tokens"] == head["total"]
        assert branch["sampled"] == sum(truth["loss_mask"])
        seen += 1
    assert seen == sum(rid not in talks.above.values() for rid in talks.texts)


def test_the_texts_of_tokens_are_the_text(served: tuple[Stack, Talks]) -> None:
    made, _ = served
    look = Look(made)
    for one, branch in branches(look):
        tokens = whole(look, one["id"], branch["id"])
        pieces = [made.spelling._piece(number, False).data for number in tokens["ids"]]
        joined = b"".join(pieces).decode("utf-8", "replace")
        assert joined.startswith("".join(tokens["texts"]))
        assert len(joined) - len("".join(tokens["texts"])) <= 1, "the last character may be half"
        for at, piece in enumerate(pieces):
            broken = tokens["bytes"].get(str(at))
            assert broken in (None, piece.hex())
            if broken is None:
                assert tokens["texts"][at].encode() == piece
        assert tokens["special"] == [at for at, one in enumerate(tokens["ids"]) if one in made.spelling.special]


def test_windows_of_any_size_agree(served: tuple[Stack, Talks]) -> None:
    made, _ = served
    look = Look(made)
    one, branch = max(branches(look), key=lambda pair: pair[1]["tokens"])
    expected = whole(look, one["id"], branch["id"])
    for size in (1, 3, 7):
        assert whole(look, one["id"], branch["id"], size) == expected


def test_drift_is_where_the_whole_text_encoded_again_differs(served: tuple[Stack, Talks]) -> None:
    """A token is kept if the new encoding has it at the same characters; of tokens that share a character, all or none."""
    made, _ = served
    look, spelling = Look(made), made.spelling
    drifted = 0
    for one, branch in branches(look):
        head = look.until_drift(one["id"], branch["id"])
        window = look.branch(one["id"], branch["id"], "/tokens", start=0, end=5_000)
        ids, mask = window["ids"], window["mask"]
        text = spelling.text_of_request(ids)
        if "�" in text:
            continue  # half a character: the texts of the two are not the same
        again = spelling.encode_start(text)
        kept = set(placed(made, again, text))
        groups = sharing_characters(placed(made, ids, text), text.encode())
        expected = {at for group in groups if not kept.issuperset(group.values()) for at in group if mask[at]}
        found = {at for span in window["drift"] for at in range(span["start"], span["end"]) if mask[at]}
        assert found == expected
        assert head["drift"]["drifted_tokens"] == len(expected)
        assert head["drift"]["sampled_tokens"] == sum(mask)
        assert sum(turn["drifted"] for turn in head["turns"]) == len(expected)
        for span in window["drift"]:
            assert span["sampled"] == ids[span["start"] : span["end"]]
            assert span["encoded"] != span["sampled"]
        drifted += len(expected)
    assert drifted, "nothing drifted, so nothing was tested"


def sharing_characters(tokens: list[tuple[int, int, int]], text: bytes) -> Iterator[dict[int, tuple[int, int, int]]]:
    """The tokens by number, those together that have bytes of one character."""
    group = {}
    for at, token in enumerate(tokens):
        group[at] = token
        if text[token[1] : token[1] + 1] < b"\x80" or text[token[1]] >= 0xC0:
            yield group
            group = {}


def placed(made: Stack, ids: list[int], text: str) -> list[tuple[int, int, int]]:
    """Each token with the bytes that it spells: from where, to where. What a start gains lies before the text."""
    pieces = [made.spelling._piece(number, False).data for number in ids]
    end = len(text.encode()) - sum(map(len, pieces))
    found = []
    for number, piece in zip(ids, pieces, strict=True):
        found.append((max(end, 0), end + len(piece), number))
        end += len(piece)
    return found


def test_a_text_and_a_sequence_of_ids_are_found(served: tuple[Stack, Talks]) -> None:
    made, _ = served
    look = Look(made)
    rng = random.Random(2)
    for one, branch in list(branches(look))[:6]:
        tokens = whole(look, one["id"], branch["id"])
        ids, texts = tokens["ids"], tokens["texts"]
        at = rng.randrange(len(ids) - 1)
        wanted = ids[at : at + 2]
        found = look.branch(one["id"], branch["id"], "/find", token_ids=",".join(map(str, wanted)))["matches"]
        assert found == [
            {"start": place, "end": place + 2} for place in range(len(ids) - 1) if ids[place : place + 2] == wanted
        ]
        (first,) = look.branch(one["id"], branch["id"], "/find", text="says", limit=1)["matches"]
        assert "says" in "".join(texts[first["start"] : first["end"]])
        later = look.branch(one["id"], branch["id"], "/find", text="says", **{"from": first["end"]})
        assert all(place["start"] >= first["end"] for place in later["matches"])


# -- the list ----------------------------------------------------------------------------------------------------------


def test_a_conversation_is_what_continues_one_first_reply(served: tuple[Stack, Talks]) -> None:
    made, talks = served
    look = Look(made)
    listed = look.all()
    firsts: dict[str, list[str]] = {}
    for rid in talks.texts:
        first = rid
        while (above := talks.above[first]) is not None:
            first = above
        firsts.setdefault(first, []).append(rid)
    # A text may have been continued from an equal one, or only in part: then the tree knows better than its client.
    assert sum(one["turns"] for one in listed) == len(talks.texts)
    assert {one["id"] for one in listed} >= {f"text:{first}" for first in firsts if talks.above[first] is None}
    assert [one["updated"] for one in listed] == sorted((one["updated"] for one in listed), reverse=True)
    for one in listed:
        detail = look.get(path_of(one["id"]))
        nodes = {node["id"]: node for node in detail["tree"]}
        assert len(nodes) == len(detail["tree"])
        assert sum(node["sampled"] for node in nodes.values()) == one["sampled"]
        assert sum(node["tokens"] for node in nodes.values()) == one["tokens"]
        for branch in detail["branches_list"]:
            total, at = 0, branch["id"]
            while at is not None:
                assert branch["id"] in nodes[at]["branch_of"]
                at = nodes[at]["parent"]
                total += 1
            assert total >= branch["turns"]


def test_pages_make_the_whole_list(served: tuple[Stack, Talks]) -> None:
    look = Look(served[0])
    everything = look.all(limit=500)
    assert look.all(limit=1) == everything
    assert look.all(limit=3) == everything
    assert look.get("/conversations")["remembered"]["conversations"] == len(everything)


def test_filters_leave_out_what_does_not_fit(served: tuple[Stack, Talks]) -> None:
    look = Look(served[0])
    everything = look.all()
    versions = {name for one in everything for name in one["versions"]}
    assert len(versions) > 2
    for version in versions:
        assert look.all(version=version) == [one for one in everything if version in one["versions"]]
    for group in {one["group"] for one in everything}:
        assert look.all(group=group) == [one for one in everything if one["group"] == group]
    middle = sorted(one["updated"] for one in everything)[len(everything) // 2]
    assert look.all(since=repr(middle)) == [one for one in everything if one["updated"] >= middle]
    assert look.all(until=repr(middle)) == [one for one in everything if one["updated"] <= middle]
    assert look.all(exact="true") == [one for one in everything if one["exact"]]
    assert look.all(kind="session") == look.all(reward_min=0) == look.all(namespace="other") == []


def test_conversations_are_found_by_what_is_in_them(served: tuple[Stack, Talks]) -> None:
    made, talks = served
    look = Look(made)
    everything = look.all()
    inside = {
        one["id"]: [branch["id"] for branch in look.get(path_of(one["id"]))["branches_list"]] for one in everything
    }
    for word in ("你好", "</script>", " x = 1;", "nowhere"):
        expected = [one for one in everything if any(word in talks.texts.get(name, "") for name in inside[one["id"]])]
        assert look.all(text=word) == expected
    for rid in list(talks.texts)[:5]:
        (found,) = look.all(id=rid)
        assert any(node["request_id"] == rid for node in look.get(path_of(found["id"]))["tree"])
    chosen = everything[0]
    ids = whole(look, chosen["id"], inside[chosen["id"]][0])["ids"][-5:]
    assert chosen in look.all(token_ids=",".join(map(str, ids)))
    assert look.all(token_ids="1,1,1,1,1,1,1") == []


def test_nothing_new_is_204(served: tuple[Stack, Talks]) -> None:
    made, _ = served
    look = Look(made)
    change = look.get("/conversations")["change"]
    assert look.ask("/conversations", changed_since=change).status == 204
    made.generate({"text": "something else", "sampling_params": {"max_new_tokens": 3}, "rid": "new"})
    page = look.get("/conversations", changed_since=change)
    assert page["change"] > change
    assert page["conversations"][0]["id"] == "text:new"


def test_two_branches_are_compared(served: tuple[Stack, Talks]) -> None:
    look = Look(served[0])
    pairs = list(branches(look))
    (a, one), (b, other) = pairs[0], pairs[-1]
    left, right = (whole(look, x["id"], y["id"])["ids"] for x, y in ((a, one), (b, other)))
    found = look.get("/compare", a=a["id"], a_branch=one["id"], b=b["id"], b_branch=other["id"])
    first = next((at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)
    assert found["first_difference"] == {"a": first, "b": first}
    assert [run["a"][0] for run in found["runs"]] == [0, *(run["a"][1] for run in found["runs"][:-1])]
    assert found["runs"][-1]["a"][1] == len(left)
    assert found["runs"][-1]["b"][1] == len(right)
    for run in found["runs"]:
        same = left[slice(*run["a"])] == right[slice(*run["b"])]
        assert same is (run["op"] == "equal")
    alike = look.get("/compare", a=a["id"], b=a["id"], a_branch=one["id"], b_branch=one["id"])
    assert alike["first_difference"] is None
    assert [run["op"] for run in alike["runs"]] == ["equal"]


def test_a_text_is_explained_as_a_retrieval_answers(served: tuple[Stack, Talks]) -> None:
    made, talks = served
    for rid, text in list(talks.texts.items())[:8]:
        for asked in (text, text[:-1], text + " and more", "unheard of"):
            found = made.post(f"{API}/explain", {"text": asked}).json()
            told = made.post("/radix_tree/explain", {"text": asked}).json()
            truth = made.retrieve(asked)
            assert {name: found[name] for name in told} == told
            assert (found["exact"], found["reasons"]) == (truth["exact"], truth["reasons"]), (rid, asked)
            assert [one["reason"] for one in found["advice"]] == found["reasons"]
            assert all(one["what"] and one["do"] for one in found["advice"])


def test_a_text_of_which_the_store_may_know_more_is_not_explained_as_exact(tmp_path: Path) -> None:
    """The router knows the first turn; the second one is another router's, and cannot be read."""
    store = StoreConfig(url=f"sqlite:{tmp_path}")
    with (
        stack("qwen", styles=("incremental",), store=store) as made,
        stack("qwen", styles=("incremental",), store=store) as other,
    ):
        body = {"text": "known", "sampling_params": {"max_new_tokens": 4}}
        text = "known" + made.generate(body).body["text"]
        assert made.post(f"{API}/explain", {"text": text}).json()["exact"]
        text += " and more"
        text += other.generate({**body, "text": text}).body["text"]
        with closing(connect(tmp_path / "store.sqlite3")) as file:
            file.execute("UPDATE records SET body = x'00' WHERE n > 2")
        found, truth = made.post(f"{API}/explain", {"text": text}).json(), made.retrieve(text)
        assert (found["exact"], found["reasons"]) == (truth["exact"], truth["reasons"])
        assert (found["exact"], found["reasons"]) == (False, ["store_unreachable", "retokenized"])
        assert [one["reason"] for one in found["advice"]] == found["reasons"]
        told = made.post("/radix_tree/explain", {"text": text}).json()
        assert told["message"] == found["message"]
        assert told["message"].endswith(". The store does not answer, and may know more: ask again once it does")


def test_the_run_report_counts_every_token_once(served: tuple[Stack, Talks]) -> None:
    made, talks = served
    look = Look(made)
    until(lambda: look.get("/run")["done"], "the report is done")
    report = look.get("/run")
    everything = look.all()
    assert report["done"]
    assert report["progress"] == 1
    assert report["conversations"] == len(everything)
    assert report["sampled_tokens"] == sum(one["sampled"] for one in everything)
    assert report["tokens"] == sum(one["tokens"] for one in everything)
    assert sum(one["tokens"] for one in report["staleness"]) == report["sampled_tokens"]
    assert sum(one["tokens"] for one in report["sampled_over_time"]) == report["sampled_tokens"]
    assert sum(report["logprobs"]["counts"]) == report["sampled_tokens"]
    assert len(report["logprobs"]["edges"]) == len(report["logprobs"]["counts"]) + 1
    drift = report["drift"]
    assert 0.9 * report["sampled_tokens"] < drift["sampled_tokens"] <= report["sampled_tokens"]
    assert sum(one["tokens"] for one in drift["by_kind"]) == drift["sampled_tokens"]
    assert sum(one["drifted"] for one in drift["by_kind"]) == drift["drifted_tokens"] > 0
    assert drift["pairs"][0]["count"] >= drift["pairs"][-1]["count"]
    replies = [turn for one, branch in branches(look) for turn in look.branch(one["id"], branch["id"])["turns"]]
    assert replies
    assert talks.texts


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [files.WINDOW, 7], ids=["at once", "in many steps"])
def test_a_branch_is_downloaded_as_it_is_shown(
    served: tuple[Stack, Talks], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WINDOW", window)
    look = Look(served[0])
    one, branch = max(branches(look), key=lambda pair: pair[1]["tokens"])
    shown = whole(look, one["id"], branch["id"])
    found = look.branch(one["id"], branch["id"], "/download", format="json")
    assert {name: found["tokens"][name] for name in shown} == shown
    assert found["branch"] == look.until_drift(one["id"], branch["id"])
    assert found["conversation"]["id"] == one["id"]
    answer = look.ask(path_of(one["id"], branch["id"]) + "/download", format="parquet")
    rows = pyarrow.parquet.read_table(io.BytesIO(answer.content)).to_pylist()
    assert [row["id"] for row in rows] == shown["ids"]
    assert [row["logprob"] for row in rows] == shown["logprobs"]
    assert [row["mask"] for row in rows] == shown["mask"]
    assert [row["text"] for row in rows] == shown["texts"]
    versions = look.branch(one["id"], branch["id"])["versions"]
    assert [row["version"] for row in rows] == [None if at < 0 else versions[at] for at in shown["versions"]]
    assert None in [row["version"] for row in rows]
    assert answer.headers["content-disposition"].startswith("attachment;")


def test_a_saved_page_holds_the_branch_and_nothing_of_it_is_markup(served: tuple[Stack, Talks]) -> None:
    made, talks = served
    look = Look(made)
    one, branch = next(pair for pair in branches(look) if "</script>" in talks.texts.get(pair[1]["id"], ""))
    answer = look.ask(path_of(one["id"], branch["id"]) + "/download", format="html")
    page = answer.content.decode()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert "<" not in data
    answers = json.loads(data)["answers"]
    folder = f"/conversations/{one['id']}"
    assert answers[folder] == look.get(path_of(one["id"]))
    tokens = answers[f"{folder}/branches/{branch['id']}/tokens"]
    assert tokens["ids"] == whole(look, one["id"], branch["id"])["ids"]
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\'' in page


# -- what is wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/conversations?limit=0", 400),
        ("/conversations?limit=501", 400),
        ("/conversations?limit=x", 400),
        ("/conversations?limit=999999999999999999999999999", 400),
        ("/conversations?limt=5", 400),
        ("/conversations?limit=5&limit=6", 400),
        ("/conversations?cursor=nothing", 400),
        ("/conversations?cursor=%C2%B2~x", 400),
        ("/conversations?kind=other", 400),
        ("/conversations?exact=yes", 400),
        ("/conversations?since=nan", 400),
        ("/conversations?token_ids=1,x", 400),
        ("/conversations?token_ids=-1", 400),
        ("/conversations?token_ids=99999999999", 400),
        ("/conversations?token_ids=" + ",".join(["1"] * 1_001), 400),
        ("/conversations?text=" + "x" * 10_001, 400),
        ("/conversations?id=" + "x" * 2_000, 400),
        ("/conversations/text:unknown", 404),
        ("/conversations/session:unknown", 404),
        ("/conversations/unknown", 404),
        ("/conversations/{id}/branches/unknown", 404),
        ("/conversations/{id}/branches/{branch}/nothing", 404),
        ("/conversations/{id}/branches/{branch}/tokens?start=0&end=5001", 400),
        ("/conversations/{id}/branches/{branch}/tokens?start=5&end=4", 400),
        ("/conversations/{id}/branches/{branch}/tokens?start=-1", 400),
        ("/conversations/{id}/branches/{branch}/find", 400),
        ("/conversations/{id}/branches/{branch}/find?text=a&token_ids=1", 400),
        ("/conversations/{id}/branches/{branch}/find?text=a&limit=1001", 400),
        ("/conversations/{id}/branches/{branch}/download?format=pdf", 400),
        ("/compare", 400),
        ("/compare?a={id}", 400),
        ("/compare?a={id}&b=text:unknown", 404),
        ("/run?x=1", 400),
        ("/nothing", 404),
        ("", 404),
    ],
)
def test_what_is_wrong_is_told(served: tuple[Stack, Talks], path: str, status: int) -> None:
    look = Look(served[0])
    one, branch = next(branches(look))
    found = served[0].get(API + path.format(id=quote(one["id"], safe=""), branch=quote(branch["id"], safe="")))
    assert (found.status, found.json()["error"]["code"]) == (status, status)


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"text": 1}', b'{"text": ""}', b"\xff", b'{"text": "\\ud800"}'])
def test_a_wrong_body_is_400(served: tuple[Stack, Talks], body: bytes) -> None:
    assert served[0].post(f"{API}/explain", None, raw=body).status in (200, 400)
    if body != b'{"text": "\\ud800"}':
        assert served[0].post(f"{API}/explain", None, raw=body).status == 400


def test_a_text_that_is_too_long_is_not_explained() -> None:
    """Walking along it would hold up everybody. The limit is that of /radix_tree/explain."""
    with stack("qwen", styles=("incremental",), radix={"max_text_tokens": 10}) as made:
        for text, status in (("a" * 20, 200), ("a" * 1_000, 413)):
            for path in (f"{API}/explain", "/radix_tree/explain"):
                assert made.post(path, {"text": text}).status == status, path


def test_only_some_methods_are_served(served: tuple[Stack, Talks]) -> None:
    for path, method in (("/conversations", "POST"), ("/explain", "GET"), ("/run", "DELETE")):
        answer = served[0].exchange(method, API + path)
        assert answer.status == 405
        assert answer.headers["allow"]


def test_a_window_behind_the_end_is_empty(served: tuple[Stack, Talks]) -> None:
    look = Look(served[0])
    one, branch = next(branches(look))
    window = look.branch(one["id"], branch["id"], "/tokens", start=4_000, end=4_100)
    assert window["ids"] == []
    assert window["start"] == window["end"] == window["total"]


# -- the page's files --------------------------------------------------------------------------------------------------


def test_the_page_and_its_files_are_guarded(served: tuple[Stack, Talks]) -> None:
    made, _ = served
    for path in ("/inspect", "/inspect/assets/main.js"):
        answer = made.get(path)
        assert answer.status == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = made.exchange("GET", path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status, again.content) == (304, b"")
    for path in (
        "../api.py",
        "..%2Fapi.py",
        "nothing.js",
        "",
        "/etc/passwd",
        ".hidden",
        "a" * 5_000 + ".js",
        "a%0A.js",
    ):
        assert made.get(f"/inspect/assets/{path}").status == 404, path
    assert made.get("/inspect/").headers["location"] == "../inspect"
    for method, path in (
        ("GET", "/inspect/"),
        ("GET", "/inspect/assets/no.js"),
        ("GET", API),
        ("DELETE", f"{API}/run"),
    ):
        assert made.exchange(method, path).headers["x-content-type-options"] == "nosniff"


def test_no_path_below_the_page_goes_to_a_worker() -> None:
    """These paths need no key."""
    with stack("qwen", styles=("incremental",), server={"api_keys": ("a:key-of-a",)}) as made:
        for path in ("assets/a%0Ab", "%0A/../../get_model_info", "a%0D%0Ab", "../get_model_info", "nothing"):
            answer = made.get(f"/inspect/{path}")
            assert answer.status == 404
            assert "x-router-worker" not in answer.headers
        key = {"authorization": "Bearer key-of-a"}
        assert "x-router-worker" not in made.exchange("GET", "/workers/a%0Ab", headers=key).headers


def test_an_id_with_a_newline_is_opened(agents: Stack) -> None:
    body = {"text": "newline ", "rid": "a\r\nb", "sampling_params": {"max_new_tokens": 2}}
    agents.generate(body)
    assert Look(agents).get(path_of("text:a\r\nb"))["id"] == "text:a\r\nb"


# -- sessions ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agents() -> Iterator[Stack]:
    with stack(
        "qwen", styles=("incremental",), sessions={"chat_template": str(templates.folder() / "qwen2_5.jinja")}
    ) as made:
        yield made


def played(made: Stack) -> AgentSession:
    """A session with every kind of branch."""
    agent = AgentSession.make(made)
    first = agent.must(user("a question"), says="one")
    agent.must(user("a question"), first.message, user("much text"), says="two")
    agent.must(user("a question"), first.message, user("in short"), says="three 你好")
    agent.must(user("a question"), says="one")
    agent.must(system("You plan."), user("a question"), says="Plan.")
    return agent


def test_a_session_is_what_its_export_is(agents: Stack) -> None:
    agent = played(agents)
    look = Look(agents)
    name = f"session:{agent.name}"
    detail = look.get(path_of(name))
    agents.post(f"/sessions/{agent.name}/reward_info", {"reward_info": {"reward": 0.5}})
    exported = agent.finalize(shared_turns="every")
    assert [one["id"] for one in detail["branches_list"]] == [one["branch"] for one in reversed(exported)]
    assert {node["id"] for node in detail["tree"] if node["role"] == "assistant"} >= {one["branch"] for one in exported}
    for truth in exported:
        head = look.branch(name, truth["branch"])
        tokens = whole(look, name, truth["branch"])
        begin = len(truth["prompt_ids"])
        assert tokens["ids"] == [*truth["prompt_ids"], *truth["response_ids"]]
        assert tokens["mask"] == [0] * begin + truth["response_mask"]
        assert [value or 0.0 for value in tokens["logprobs"][begin:]] == truth["response_logprobs"]
        assert (head["exact"], head["reasons"]) == (truth["exact"], truth["reasons"])
        sampled = [turn for turn in head["turns"] if turn["sampled"]]
        assert [(one["start"], one["end"]) for one in sampled] == [
            (one["start"] + begin, one["end"] + begin) for one in truth["turns"]
        ]
        assert head["reward"] == 0.5
    (listed,) = look.all(id=agent.name)
    assert (listed["turns"], listed["branches"], listed["reward"]) == (5, len(exported), 0.5)
    assert listed["title"] == "a question"
    assert look.all(text="你好", kind="session")[0]["id"] == name
    assert look.all(reward_min=0.4, reward_max=0.6)[0]["id"] == name
    assert look.all(reward_min=0.5, reward_max=0.5)[0]["id"] == name
    assert look.all(reward_min=0.6) == []


def test_a_deleted_session_is_gone(agents: Stack) -> None:
    agent = played(agents)
    look = Look(agents)
    change = look.get("/conversations")["change"]
    agents.exchange("DELETE", f"/sessions/{agent.name}")
    assert look.ask(path_of(f"session:{agent.name}")).status == 404
    assert look.get("/conversations")["change"] > change


# -- whose -------------------------------------------------------------------------------------------------------------


def test_a_tenant_sees_its_own_memory_only() -> None:
    server = {"api_keys": ("a:key-of-a", "b:key-of-b"), "admin_keys": ("key-of-all",)}
    sessions = {"chat_template": str(templates.folder() / "qwen2_5.jinja")}
    with stack("qwen", styles=("incremental",), server=server, sessions=sessions) as made:
        keys = {name: {"authorization": f"Bearer key-of-{name}"} for name in ("a", "b", "all")}
        a, b, admin = (Look(made, keys[name]) for name in ("a", "b", "all"))
        body = {"text": "a secret", "rid": "theirs", "sampling_params": {"max_new_tokens": 4}}
        before = b.get("/conversations")["change"]
        text = "a secret" + made.generate(body, headers=keys["a"]).body["text"]
        assert made.exchange("POST", "/sessions", {"session_id": "s"}, headers=keys["a"]).status == 201
        assert {one["id"] for one in a.all()} == {"text:theirs", "session:s"}
        assert b.all() == b.all(text="secret") == b.all(id="theirs") == b.all(id="s") == []
        assert b.get("/conversations")["change"] == before, "nobody can count what others do"
        assert b.get("/conversations")["remembered"]["conversations"] == 0
        for path in ("text:theirs", "session:s"):
            assert a.ask(path_of(path)).status == 200
            assert b.ask(path_of(path)).status == 404
            assert admin.ask(path_of(path)).status == 404
        assert b.ask("/compare", a="text:theirs", b="text:theirs").status == 404
        assert b.get("/run")["tokens"] == 0
        explained = made.post(f"{API}/explain", {"text": text}, headers=keys["b"]).json()
        assert (explained["tokens"], explained["matched_chars"]) == (0, 0)
        acting = Look(made, {**keys["all"], "x-tenant": "a"})
        assert {one["id"] for one in acting.all()} == {"text:theirs", "session:s"}
        for path in ("/conversations", "/run", "/conversations/text:theirs"):
            assert made.get(API + path).status == 401
        assert made.get("/inspect").status == made.get("/inspect/assets/main.js").status == 200


def test_namespaces_and_adapters_are_told_apart(agents: Stack) -> None:
    look = Look(agents)
    body = {"text": "one text", "rid": "same", "sampling_params": {"max_new_tokens": 4}}
    agents.generate(body, headers={"x-radix-namespace": "eval"})
    agents.generate(body, headers={"x-radix-namespace": "train"})
    (one,) = look.all(namespace="eval")
    (other,) = look.all(namespace="train")
    assert one["id"] != other["id"]
    assert one["group"] != other["group"]
    for found in (one, other):
        detail = look.get(path_of(found["id"]))
        assert detail["namespace"] == found["namespace"]
        assert len(detail["branches_list"]) == 1


def test_a_reward_that_no_float_holds_is_no_number(agents: Stack) -> None:
    agent = played(agents)
    sent = b'{"reward_info":{"score":1%b}}' % (b"0" * 400)
    assert agents.post(f"{agent.path}/reward_info", None, raw=sent).status == 200
    (listed,) = [one for one in Look(agents).all() if one["id"] == f"session:{agent.name}"]
    assert listed["reward"] is None


def test_of_several_numbers_none_is_the_reward_unless_it_is_called_so(agents: Stack) -> None:
    for info, reward in (({"speed": 1, "style": 2}, None), ({"speed": 1}, 1.0), ({"style": 2, "reward": 3}, 3.0)):
        agent = AgentSession.make(agents)
        agent.must(user("a question"), says="one")
        assert agents.post(f"{agent.path}/reward_info", {"reward_info": info}).status == 200
        (listed,) = Look(agents).all(id=agent.name)
        assert listed["reward"] == reward


def test_a_turn_that_is_not_over_is_not_shown(agents: Stack) -> None:
    agent = AgentSession.make(agents)
    first = agent.must(user("a question"), says="one")
    look, name = Look(agents), path_of(f"session:{agent.name}")
    before = look.get(name)["tree"]
    (worker,) = agents.workers
    worker.hold()
    with ThreadPoolExecutor(1) as other:
        asked = [user("a question"), first.message, user("another question")]
        running = other.submit(agent.must, *asked, says="two")
        worker.wait_for_arrivals(1)
        during = look.get(name)["tree"]
        worker.release()
        running.result()
    assert during == before
    assert len(look.get(name)["tree"]) == len(before) + 2


def test_groups_and_rewards_are_those_of_the_ledger() -> None:
    with stack("qwen", styles=("incremental",)) as made:
        look = Look(made)
        for name in ("x", "y", "z"):
            body = {"text": f"of {name}", "rid": name, "sampling_params": {"max_new_tokens": 4}}
            made.generate(body, headers={"x-group-id": "g", "x-rollout-id": name} if name != "z" else {})
        answer = made.post("/trajectories/reward", {"request_id": "x", "reward": 0.25})
        assert answer.status == 200, answer.content
        found = {one["id"]: one for one in look.all()}
        assert {one["id"] for one in look.all(group="g")} == {"text:x", "text:y"}
        assert found["text:z"]["group"] not in (None, "g")
        assert [found[f"text:{name}"]["reward"] for name in "xyz"] == [0.25, None, None]
        assert [one["id"] for one in look.all(reward_min=0.2)] == ["text:x"]
        assert look.branch("text:x", "x")["reward"] == 0.25


def test_with_a_store_the_last_group_and_reward_are_seen_at_once(tmp_path: Any) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path}/store")
    with stack("qwen", styles=("incremental",), store=store) as made:
        look = Look(made)
        body = {"text": "a text", "rid": "x", "sampling_params": {"max_new_tokens": 4}}
        made.generate(body, headers={"x-group-id": "g"})
        before = look.get("/conversations")
        assert [(one["group"], one["reward"]) for one in before["conversations"]] == [("g", None)]
        assert made.post("/trajectories/reward", {"request_id": "x", "reward": 0.25}).status == 200
        after = look.get("/conversations", changed_since=before["change"])
        assert [one["reward"] for one in after["conversations"]] == [0.25]
        assert look.ask("/conversations", changed_since=after["change"]).status == 204
        assert made.post("/trajectories/reward", {"request_id": "x", "reward": 0.5}).status == 200
        assert look.branch("text:x", "x")["reward"] == 0.5
        assert made.post("/trajectories/reward", {"request_id": "x", "reward": 0.75}).status == 200
        assert look.get(path_of("text:x"))["reward"] == 0.75


@pytest.mark.parametrize("stored", [False, True])
def test_what_a_trainer_has_acknowledged_keeps_its_group_and_reward(tmp_path: Any, stored: bool) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path}/store") if stored else None
    with stack("qwen", styles=("incremental",), store=store) as made:
        look = Look(made)
        body = {"text": "a text", "rid": "x", "sampling_params": {"max_new_tokens": 4}}
        made.generate(body, headers={"x-group-id": "g", "x-group-size": "1"})
        assert made.post("/trajectories/reward", {"request_id": "x", "reward": 0.25}).status == 200
        claim = made.post("/trajectories/claim", {}).json()["claim_id"]
        assert made.post("/trajectories/ack", {"claim_id": claim}).status == 200
        assert made.get("/trajectories?group=g").status == 404
        assert [(one["group"], one["reward"]) for one in look.all(reward_min=0.2)] == [("g", 0.25)]
        assert look.branch("text:x", "x")["reward"] == 0.25


# -- an inspector that is off, and memories that come and go ------------------------------------------------------------


def test_off_leaves_all_of_it_out() -> None:
    with stack("qwen", styles=("incremental",), radix={"inspector": False}) as made:
        for path in ("/inspect", "/inspect/", "/inspect/assets/main.js", f"{API}/conversations", f"{API}/run"):
            assert made.get(path).status == 404
        assert made.post(f"{API}/explain", {"text": "a"}).status == 404
        assert not made.workers[0].log


def test_an_empty_memory_is_an_empty_list() -> None:
    with stack("qwen", styles=("incremental",)) as made:
        look = Look(made)
        page = look.get("/conversations")
        assert page["conversations"] == []
        assert page["next"] is None
        assert page["remembered"] == {"conversations": 0, "sessions": 0, "more": False, "tokens": 0, "processes": 1}
        report = look.get("/run")
        assert (report["done"], report["tokens"], report["logprobs"]["by_version"]) == (True, 0, [])
        assert made.post(f"{API}/explain", {"text": "hello"}).json()["tokens"] == 0


def test_what_is_evicted_leaves_the_list() -> None:
    """A list that was followed is the list that a new look makes."""
    with stack("qwen", styles=("incremental",), radix={"max_tokens": 300}) as made:
        look = Look(made)
        talks = Talks(made, 3, "e")
        for _ in range(12):
            talks.play(5)
            talks.prefix += "e"
            followed = look.all()
            stats = made.get("/radix_tree/stats").json()
            assert sum(one["turns"] for one in followed) == stats["generations"]
            for one in followed[:3]:
                branch = look.get(path_of(one["id"]))["branches_list"][0]
                assert len(whole(look, one["id"], branch["id"])["ids"]) == branch["tokens"]
        assert stats["evictions"]


def test_a_look_does_not_count_as_a_retrieval() -> None:
    """What nobody retrieved goes last: an inspector must not change that."""
    with stack("qwen", styles=("incremental",)) as made:
        text = "a" + made.generate({"text": "a", "rid": "r", "sampling_params": {"max_new_tokens": 4}}).body["text"]
        look = Look(made)
        look.branch("text:r", "r", "/tokens")
        look.branch("text:r", "r", "/download")
        made.post(f"{API}/explain", {"text": text})
        look.get("/run")
        assert 'retrievals_total{exact="true"} 0' in made.get("/metrics").content.decode().replace(".0", "") or not [
            line
            for line in made.get("/metrics").content.decode().splitlines()
            if "retrievals_total{" in line and not line.endswith(" 0.0")
        ]


def test_what_a_store_has_is_found_after_a_restart(tmp_path: Any) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path}/store")
    sessions = {"chat_template": str(templates.folder() / "qwen2_5.jinja")}
    with stack("qwen", styles=("incremental",), store=store, sessions=sessions) as made:
        agent = played(made)
        body = {"text": "kept", "rid": "kept", "sampling_params": {"max_new_tokens": 4}}
        text = "kept" + made.generate(body).body["text"]
        before = {one["id"]: one for one in Look(made).all()}
    with stack("qwen", styles=("incremental",), store=store, sessions=sessions) as made:
        look = Look(made)
        name = f"session:{agent.name}"
        assert [one["id"] for one in look.all(id=agent.name)] == [name]
        detail = look.get(path_of(name))
        assert {key: detail[key] for key in ("turns", "tokens", "sampled", "branches", "title")} == {
            key: before[name][key] for key in ("turns", "tokens", "sampled", "branches", "title")
        }
        assert [one["id"] for one in look.all(id="kept")] == ["text:kept"]
        tokens = whole(look, "text:kept", "kept")
        assert tokens["ids"] == made.retrieve(text)["tokens"]


def test_sessions_that_only_the_store_has_are_searched(tmp_path: Any) -> None:
    """By the words of any turn, and by ids. Nothing of them stays in memory."""
    store = StoreConfig(url=f"sqlite:{tmp_path}/store")
    sessions = {"chat_template": str(templates.folder() / "qwen2_5.jinja")}
    with stack("qwen", styles=("incremental",), store=store, sessions=sessions) as made:
        agents = [AgentSession.make(made) for _ in range(3)]
        turns = [agent.must(user("a question"), says=f"word{number}") for number, agent in enumerate(agents)]
    with stack("qwen", styles=("incremental",), store=store, sessions=sessions) as made:
        look = Look(made)
        # Each call reads on for a while. The one that reads the rest is the last in which something may be missing.
        until(lambda: not look.get("/conversations")["remembered"]["more"], "all is read")
        assert {one["id"] for one in look.all()} == {f"session:{agent.name}" for agent in agents}
        tokens = look.get("/conversations")["remembered"]["tokens"]
        for number, (agent, turn) in enumerate(zip(agents, turns, strict=True)):
            for search in ({"text": f"word{number}"}, {"token_ids": ",".join(map(str, turn.sampled))}):
                assert [one["id"] for one in look.all(**search)] == [f"session:{agent.name}"], search
        assert look.all(text="nowhere") == []
        assert look.get("/conversations")["remembered"]["tokens"] == tokens
