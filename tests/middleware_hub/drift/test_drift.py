"""`tito-router drift`: what it counts, against replies whose tokens are chosen by hand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow.parquet import read_table
from tokenizers import Tokenizer as Backend

from middleware_hub.drift.cli import LoggedReply, drifts, main, read_log
from middleware_hub.tokenizer.loaded import load
from router.errors import BadRequestError
from tests.support.vocabularies import vocabulary


@pytest.fixture(scope="module")
def backend() -> Backend:
    return load(str(vocabulary("qwen")), trust_remote_code=False)[1]


def ids(backend: Backend, *pieces: str) -> list[int]:
    """The tokens of each piece, encoded by itself: so they are chosen by where the pieces end."""
    return [token for piece in pieces for token in backend.encode(piece, add_special_tokens=False).ids]


def logged(prompt: str, text: str, sampled: list[int], line: int = 1, conversation: str = "") -> LoggedReply:
    return LoggedReply(line, conversation, prompt, text, sampled)


def test_what_is_encoded_as_it_was_sampled_is_kept(backend: Backend) -> None:
    (found,) = drifts([logged("Q: how much?\n", "It is for you.", ids(backend, "It is for you."))], backend)
    assert (found.sampled, found.whole_changed, found.whole_new, found.alone_changed) == (found.sampled, 0, 0, 0)
    assert not found.mismatch


def test_another_spelling_is_lost_and_told(backend: Backend) -> None:
    sampled = ids(backend, "It is", " fo", "r", " you.")
    usual = ids(backend, "It is for you.")
    (found,) = drifts([logged("Q: how much?\n", "It is for you.", sampled)], backend)
    assert found.whole_changed == found.alone_changed == len(set(sampled) - set(usual)) > 0
    assert found.whole_new == len(set(usual) - set(sampled))
    assert found.example == ("' fo' 'r'", "' for'")


def test_a_seam_is_lost_only_in_the_whole_text(backend: Backend) -> None:
    """The reply begins in the middle of what the tokenizer takes for one token."""
    sampled = ids(backend, "ord.")
    (found,) = drifts([logged("Say the w", "ord.", sampled)], backend)
    assert found.alone_changed == 0
    assert found.whole_changed > 0


def test_what_the_text_lacks_is_counted_by_itself(backend: Backend) -> None:
    (found,) = drifts([logged("Q", " Yes.", [*ids(backend, " Yes."), *ids(backend, "<|im_end|>")])], backend)
    assert (found.hidden, found.whole_changed) == (1, 1)


def test_a_conversation_is_compared_at_its_end(backend: Backend) -> None:
    first = logged("Q:", " Yes.", ids(backend, " Yes."), 1)
    second = logged("Q: Yes.\nSure?", " No.", ids(backend, " No."), 2)
    assert [one.left_out for one in drifts([first, second], backend)] == [False, False]
    stripped = logged("Q:Yes.\nSure?", " No.", ids(backend, " No."), 2, "c")
    named = logged("Q:", " Yes.", ids(backend, " Yes."), 1, "c")
    assert [one.left_out for one in drifts([named, stripped], backend)] == [True, False]


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a", "text": "b", "output_ids": [1, 2]}',
        '{"request": {"text": "a"}, "response": {"text": "b", "output_ids": [1, 2], "meta_info": {}}}',
        '{"prompt": "a", "text": "b", "meta_info": {"output_token_logprobs": [[-1.0, 1, null], [-1.0, 2, null]]}}',
    ],
)
def test_lines(line: str) -> None:
    (found,) = read_log([line.encode(), b"\n"])
    assert (found.prompt, found.text, found.ids) == ("a", "b", [1, 2])


@pytest.mark.parametrize(
    "line",
    [
        *("x", "[]", '{"text": "b"}', '{"text": ["b"], "output_ids": []}', '{"text": "b", "output_ids": ["c"]}'),
        '{"text": "latin-1: \xfc", "output_ids": [1]}',
        '{"text": ' + "[" * 100_000,
        *('{"text": "b", "output_ids": [-1]}', '{"text": "b", "output_ids": [4294967296]}'),
    ],
    ids=range(9),
)
def test_a_line_that_is_none_is_named(line: str) -> None:
    with pytest.raises(BadRequestError, match="line 2"):
        list(read_log([b'{"prompt": "a", "text": "b", "output_ids": [1]}', line.encode("latin-1")]))


def test_what_a_line_lacks_is_named() -> None:
    with pytest.raises(BadRequestError, match="line 1: it has no `output_ids`"):
        list(read_log([b'{"prompt": "a", "text": "b"}']))


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_command(backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"prompt": "Q\n", "text": "It is for you.", "output_ids": ids(backend, "It is", " fo", "r", " you.")},
        {"prompt": "R\n", "text": "Yes.", "output_ids": ids(backend, "Yes.")},
    ]
    parquet = tmp_path / "drift.parquet"
    log = write(tmp_path / "log.jsonl", rows)
    with pytest.raises(SystemExit) as ended:
        main(["--text-log", log, "--tokenizer-path", str(vocabulary("qwen")), "--parquet", str(parquet)])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("2 replies, ")
    assert "sampled ' fo' 'r'  encoded ' for'" in printed
    table = read_table(parquet).to_pylist()
    assert [row["line"] for row in table] == [1, 2]
    assert [row["whole_changed"] > 0 for row in table] == [True, False]


def test_another_tokenizer_is_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path / "log.jsonl", [{"prompt": "Q", "text": "Some words", "output_ids": [5, 6, 7]}])
    with pytest.raises(SystemExit) as ended:
        main(["--text-log", log, "--tokenizer", str(vocabulary("qwen"))])
    assert ended.value.code == 1
    assert "Is it their tokenizer?" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "words"), [("missing.jsonl", "No such file"), ("empty.jsonl", "no reply")])
def test_a_log_that_is_none(name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(SystemExit) as ended:
        main(["--text-log", str(tmp_path / name), "--tokenizer", str(vocabulary("qwen"))])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("installed", "words"), [(True, "there is no folder"), (False, "--parquet needs pyarrow")])
def test_what_keeps_a_file_from_being_written_is_told_first(
    installed: bool,
    words: str,
    backend: Backend,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = write(tmp_path / "log.jsonl", [{"prompt": "R\n", "text": "Yes.", "output_ids": ids(backend, "Yes.")}])
    folder = tmp_path / "none" if installed else tmp_path
    if not installed:
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else find(name))
    with pytest.raises(SystemExit) as ended:
        main(["--text-log", log, "--tokenizer", str(vocabulary("qwen")), "--parquet", str(folder / "drift.parquet")])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.out == ""
