"""Images in the inspector's API: what it shows of them is what a retrieval answers, to the tenant that has sent them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tokenizers import Tokenizer

from router.config import StoreConfig
from tests.support.asking import until
from tests.support.pictures import data_url, digest, picture
from tests.support.stack import Stack, stack
from worker.engine.prompt_images import length_of
from worker.models.ngram import shipped_image_tokenizer

Json = dict[str, Any]
API = "/inspect/api"
PAD = "<|image_pad|>"
IMAGE = f"<|vision_start|>{PAD}<|vision_end|>"
CAT, DOG = picture(40, 30, 1), picture(30, 50, 2, "JPEG")
LIKE_CAT = next(
    one for one in (picture(40, 30, seed) for seed in count(10)) if length_of(digest(one)) == length_of(digest(CAT))
)
"""Another picture with as many tokens as the cat's."""
FOLDER = shipped_image_tokenizer()


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), folder=FOLDER) as made:
        yield made


def ask(made: Stack, path: str, **headers: str) -> Any:
    answer = made.exchange("GET", API + path, headers=headers)
    assert answer.status == 200, answer.content
    return answer.json()


def played(made: Stack, rid: str, pictures: Sequence[bytes], word: str = "Look", **headers: str) -> str:
    """A turn for each picture; returns the text of them all. The last reply is called `rid`, the first one `rid-0`."""
    text = ""
    for turn in range(len(pictures)):
        text += f"{word} {turn}: {IMAGE} and?\n"
        name = rid if turn + 1 == len(pictures) else f"{rid}-{turn}"
        body = {"text": text, "image_data": [data_url(one) for one in pictures[: turn + 1]], "rid": name}
        reply = made.generate(body | {"sampling_params": {"max_new_tokens": 9, "ignore_eos": True}}, headers=headers)
        text += str(reply.body["text"])
    return text


def branch(conversation: str, name: str) -> str:
    return f"/conversations/{quote(conversation, safe='')}/branches/{quote(name, safe='')}"


def sizes(pictures: Sequence[bytes]) -> list[int]:
    return [len(one) for one in pictures]


def test_a_branch_shows_the_images_of_a_retrieval(served: Stack) -> None:
    pictures = [CAT, DOG, CAT]
    text = played(served, "shown", pictures)
    true = served.retrieve(text, image_data=[digest(one) for one in pictures])
    path = branch("text:shown-0", "shown")
    head = ask(served, path)
    fields = ("digest", "mime", "width", "height", "span")
    told = [{name: one[name] for name in fields} for one in true["multi_modal_data"]["images"]]
    assert [{name: one[name] for name in fields} for one in head["images"]] == told
    assert [one["size"] for one in head["images"]] == sizes(pictures)
    assert ask(served, f"{path}/tokens?start=0&end={head['total']}")["ids"] == true["tokens"]
    whole = ask(served, "/conversations/text%3Ashown-0")
    assert whole["images"] == whole["branches_list"][0]["images"] == 3
    assert [one["digest"] for node in whole["tree"] for one in node["pictures"]] == [digest(one) for one in pictures]
    for written in (whole["title"], head["text_preview"], *(node["preview"] for node in whole["tree"])):
        assert PAD + PAD not in written, "an image is one placeholder wherever a text is shown"
    assert whole["title"].startswith(f"Look 0: {IMAGE} and?")


def test_a_session_shows_the_images_of_its_trajectory(served: Stack) -> None:
    assert served.exchange("POST", "/sessions", {"session_id": "seen"}).status == 201
    messages: list[Json] = []
    for turn, one in enumerate((CAT, DOG)):
        parts = [{"type": "text", "text": f"Turn {turn}"}, {"type": "image_url", "image_url": {"url": data_url(one)}}]
        messages.append({"role": "user", "content": parts})
        body = {"messages": messages, "max_tokens": 8}
        answer = served.exchange("POST", "/sessions/seen/v1/chat/completions", body)
        messages.append(answer.json()["choices"][0]["message"])
    whole = ask(served, "/conversations/session%3Aseen")
    (line,) = whole["branches_list"]
    head = ask(served, branch("session:seen", line["id"]))
    (true,) = served.exchange("POST", "/sessions/seen/finalize", {}).json()["trajectories"]
    told = [(one["digest"], one["span"]) for one in true["multi_modal_data"]["images"]]
    assert [(one["digest"], one["span"]) for one in head["images"]] == told
    assert (whole["images"], whole["title"]) == (2, "Turn 0 [image]")
    shown = {node["preview"]: [one["digest"] for one in node["pictures"]] for node in whole["tree"]}
    assert shown["Turn 1 [image]"] == [digest(DOG)]
    assert sum(node["images"] for node in whole["tree"]) == 2


def test_images_of_one_length_are_different_and_nothing_else_is(served: Stack) -> None:
    script = [100, 101, 102, 103]
    for name, one in (("this", CAT), ("that", LIKE_CAT)):
        served.workers[0].script(script)
        played(served, name, [one], "Compared")
    found = ask(served, "/compare?a=text%3Athis&b=text%3Athat")
    (span,) = [one["span"] for one in found["a"]["images"]]
    assert span == found["b"]["images"][0]["span"]
    assert found["first_difference"] == {"a": span[0], "b": span[0]}
    ends = [0, span[0], span[1], found["a"]["total"]]
    assert [(run["op"], run["a"], run["b"]) for run in found["runs"]] == [
        (op, [low, high], [low, high])
        for op, low, high in zip(("equal", "replace", "equal"), ends, ends[1:], strict=False)
    ]
    same = ask(served, "/compare?a=text%3Athis&b=text%3Athis")
    assert same["first_difference"] is None


def test_a_text_is_found_as_a_client_writes_it(served: Stack) -> None:
    text = played(served, "found", [DOG, CAT], "Found")
    path = branch("text:found-0", "found")
    spans = [one["span"] for one in ask(served, path)["images"]]
    (match,) = ask(served, f"{path}/find?text={quote(f': {IMAGE} and?')}&from=20")["matches"]
    assert match["start"] < spans[1][0] < spans[1][1] < match["end"]
    pads = ask(served, f"{path}/find?text={quote(PAD)}")["matches"]
    assert [[one["start"], one["end"]] for one in pads] == spans

    def listed(searched: str) -> list[str]:
        return [one["id"] for one in ask(served, f"/conversations?text={quote(searched)}")["conversations"]]

    assert listed(f"Found 1: {IMAGE}") == ["text:found-0"]
    assert listed(text) == ["text:found-0"]
    assert "text:found-0" in listed(digest(DOG))
    assert listed(digest(b"none")) == []
    assert listed(digest(DOG)[-12:]) == [], "half of a digest is no text of a conversation"


def test_drift_stands_behind_an_image_where_it_stands_in_the_chain(served: Stack) -> None:
    """Its two spellings are those of the tokens at its place."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    served.workers[0].script([tokenizer.encode(letter, add_special_tokens=False).ids[0] for letter in "river"])
    played(served, "drifted", [CAT], "Drifted")
    path, head = branch("text:drifted", "drifted"), dict[str, Any]()

    def known() -> bool:
        head.update(ask(served, branch("text:drifted", "drifted")))
        return head["drift"] is not None

    until(known, "the drift comes")
    window = ask(served, f"{path}/tokens?start=0&end={head['total']}")
    drifted = window["drift"]
    assert drifted
    assert head["drift"]["drifted_tokens"] > 0
    for one in drifted:
        assert window["ids"][one["start"] : one["end"]] == one["sampled"]
        assert all(window["mask"][one["start"] : one["end"]])
        assert one["start"] >= head["images"][0]["span"][1]


def test_a_saved_page_has_each_file_once(served: Stack) -> None:
    played(served, "saved", [CAT, DOG, CAT], "Saved")
    path = branch("text:saved-0", "saved")
    page = served.exchange("GET", f"{API}{path}/download?format=html").content.decode()
    for one in (CAT, DOG):
        assert page.count(data_url(one)) == 1
    assert re.search(r'Content-Security-Policy" content="[^"]* img-src data:; ', page)
    saved = served.exchange("GET", f"{API}{path}/download?format=json").json()
    assert [one["digest"] for one in saved["branch"]["images"]] == [digest(CAT), digest(DOG), digest(CAT)]


def test_a_text_with_images_is_explained(served: Stack) -> None:
    text = played(served, "told", [CAT], "Told")
    found = served.post(f"{API}/explain", {"text": text, "image_data": [digest(CAT)]}).json()
    assert (found["exact"], found["matched_chars"], found["text_length"]) == (True, len(text), len(text))
    other = served.post(f"{API}/explain", {"text": text, "image_data": [data_url(DOG)]}).json()
    assert not other["exact"]
    assert "another image" in other["message"]
    assert other["matched_chars"] == text.index(PAD)
    wrong = served.post(f"{API}/explain", {"text": text})
    assert (wrong.status, wrong.json()["error"]["code"]) == (400, "media_count")


def test_the_report_counts_images_and_files_once() -> None:
    with stack("qwen", styles=("cumulative",), folder=FOLDER) as made:
        played(made, "one", [CAT, DOG, CAT])
        played(made, "two", [CAT], "Also")
        report: Json = {}

        def done() -> bool:
            report.update(ask(made, "/run"))
            return bool(report["done"])

        until(done, "the report is made")
        images = report["images"]
        tokens = [length_of(digest(one)) for one in (CAT, DOG)]
        assert (images["count"], images["distinct"], images["tokens"]) == (4, 2, 3 * tokens[0] + tokens[1])
        assert (images["held"], images["bytes"]) == (2, len(CAT) + len(DOG))
        told = [(one["digest"], one["times"], one["tokens"], one["size"]) for one in images["commonest"]]
        assert told == [(digest(CAT), 3, tokens[0], len(CAT)), (digest(DOG), 1, tokens[1], len(DOG))]


def test_a_file_that_is_gone_is_told() -> None:
    room = {"max_bytes": 2 * len(CAT) + len(DOG)}
    with stack("qwen", styles=("cumulative",), folder=FOLDER, media=room) as made:
        played(made, "gone", [CAT])
        played(made, "more", [DOG], "More")
        for name, one, size in (("gone", CAT, None), ("more", DOG, len(DOG))):
            head = ask(made, branch(f"text:{name}", name))
            (shown,) = head["images"]
            assert (shown["digest"], shown["size"]) == (digest(one), size)
            assert shown["span"][1] - shown["span"][0] == length_of(digest(one))
        page = made.exchange("GET", f"{API}{branch('text:gone', 'gone')}/download?format=html").content.decode()
        assert "data:image/png;base64," not in page


def test_a_tenant_sees_its_own_images_only() -> None:
    keys = {"api_keys": ("a:key-of-a", "b:key-of-b")}
    with stack("qwen", styles=("cumulative",), folder=FOLDER, server=keys) as made:
        a, b = ({"authorization": f"Bearer key-of-{name}"} for name in "ab")
        played(made, "theirs", [CAT], **a)
        played(made, "mine", [DOG], **b)
        assert ask(made, branch("text:theirs", "theirs"), **a)["images"][0]["size"] == len(CAT)
        assert made.exchange("GET", API + branch("text:theirs", "theirs"), headers=b).status == 404
        assert made.exchange("GET", f"/media/{digest(CAT)}", headers=b).status == 404
        seen = made.exchange("GET", f"/media/{digest(CAT)}", headers=a)
        assert (seen.status, seen.content) == (200, CAT)
        assert seen.headers["vary"] == "authorization, x-api-key", "a browser keeps files for years, and keys change"
        assert made.get(f"/media/{digest(CAT)}").status == 401
        report = ask(made, "/run", **b)
        until(lambda: ask(made, "/run", **b)["done"], "the report is made")
        report = ask(made, "/run", **b)
        assert json.dumps(report).count(digest(CAT)) == 0
        assert report["images"]["distinct"] == 1


def test_images_of_a_store_are_shown_after_a_restart(tmp_path: Path) -> None:
    """What they are, and their files, in a saved page; and in a report that is made without a router."""
    store = StoreConfig(url=f"sqlite:{tmp_path}/store/")
    with stack("qwen", styles=("cumulative",), folder=FOLDER, store=store) as made:
        played(made, "kept", [CAT, DOG, CAT])
    with stack("qwen", styles=("cumulative",), folder=FOLDER, store=store) as made:
        assert [one["images"] for one in ask(made, "/conversations?id=kept")["conversations"]] == [3]
        path = branch("text:kept-0", "kept")
        head = ask(made, path)
        assert [one["size"] for one in head["images"]] == sizes([CAT, DOG, CAT])
        assert [one["width"] for one in head["images"]] == [40, 30, 40]
        whole = ask(made, "/conversations/text%3Akept-0")
        assert {one["size"] for node in whole["tree"] for one in node["pictures"]} == {len(CAT), len(DOG)}
        page = made.exchange("GET", f"{API}{path}/download?format=html").content.decode()
        assert [page.count(data_url(one)) for one in (CAT, DOG)] == [1, 1]
        until(lambda: ask(made, "/run")["done"], "the report is made")
        images = ask(made, "/run")["images"]
        assert (images["distinct"], images["held"], images["bytes"]) == (2, 2, len(CAT) + len(DOG))
    out = tmp_path / "report.html"
    command = [sys.executable, "-m", "router", "report", "--store", f"sqlite:{tmp_path}/store/", "--out"]
    done = subprocess.run([*command, str(out)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [out.read_text().count(data_url(one)) for one in (CAT, DOG)] == [1, 1]
    subprocess.run([*command, str(tmp_path / "report.json")], check=True, capture_output=True, timeout=120)
    images = json.loads((tmp_path / "report.json").read_text())["images"]
    assert (images["count"], images["held"], images["bytes"]) == (3, 2, len(CAT) + len(DOG))
