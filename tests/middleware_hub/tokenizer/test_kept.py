"""What a start keeps for the next one: whole or not at all, and never of another folder."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from middleware_hub.tokenizer import kept, loaded
from middleware_hub.tokenizer.tokenizer import Tokenizer
from tests.support.usual import usual
from tests.support.vocabularies import Name, vocabulary
from worker.models.ngram import shipped_tokenizer

LIBRARIES = ("pytest",)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of each test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = kept.cache_folder()
    assert folder is not None
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of a tokenizer's folder."""
    return Path(shutil.copytree(shipped_tokenizer(), tmp_path / "tokenizer"))


def key(folder: Path, *, version: int = 1, libraries: tuple[str, ...] = LIBRARIES) -> str:
    found = kept.fingerprint(folder, libraries, version)
    assert found is not None
    return found


def test_what_was_kept_is_found_under_its_key_only() -> None:
    kept.put("a", b"one\ntwo")
    assert kept.get("a") == b"one\ntwo"
    assert kept.get("b") is None


@pytest.mark.parametrize("spoilt", [b"", b"\n", b"x"])
def test_a_spoilt_file_is_no_file(cache: Path, spoilt: bytes, caplog: pytest.LogCaptureFixture) -> None:
    kept.put("a", b"content")
    whole = (cache / "a").read_bytes()
    with caplog.at_level(logging.WARNING):
        for broken in (spoilt, whole[:-1], whole + b"x", whole.replace(b"content", b"Content")):
            (cache / "a").write_bytes(broken)
            assert kept.get("a") is None
    assert "is not as it was written" in caplog.text


def test_a_file_under_anothers_key_is_no_file(cache: Path) -> None:
    kept.put("a", b"content")
    (cache / "a").rename(cache / "b")
    assert kept.get("b") is None


def test_nothing_is_kept_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    kept.put("a", b"content")
    assert kept.get("a") is None


def test_files_that_were_not_used_for_longest_are_removed(cache: Path) -> None:
    for number in range(kept.MOST_FILES):
        kept.put(f"{number}", b"content")
        os.utime(cache / f"{number}", (number, number))
    assert kept.get("0") == b"content"  # used just now
    kept.put("another", b"content")
    assert {path.name for path in cache.iterdir()} == {"0", "another", *map(str, range(2, kept.MOST_FILES))}


def test_a_fingerprint_changes_with_anything_that_is_read(source: Path) -> None:
    seen = {key(source)}
    os.utime(source / "tokenizer.json", (1, 1))
    assert key(source) in seen
    content = (source / "tokenizer.json").read_text()
    changes = [
        lambda: (source / "tokenizer.json").write_text(content.replace('"Ġthe"', '"Ġteh"')),  # as long as before
        lambda: (source / "config.json").touch(),
        lambda: (source / "config.json").write_text("{}"),
        lambda: (source / "config.json").rename(source / "added_tokens.json"),
        lambda: (source / kept.TEMPLATES).mkdir() or (source / kept.TEMPLATES / "tool.jinja").write_text("x"),
    ]
    for change in changes:
        change()
        assert key(source) not in seen
        seen.add(key(source))
    assert key(source, version=2) not in seen
    assert key(source, libraries=("pytest", "hypothesis")) not in seen
    assert key(source, libraries=("pytest", "not-installed")) in seen


def test_weights_are_not_read_for_a_fingerprint(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "LARGE_FILE", 1000)
    (source / "model.safetensors").write_bytes(b"a" * 2000)
    os.utime(source / "model.safetensors", (1, 1))
    before = key(source)
    (source / "model.safetensors").write_bytes(b"b" * 2000)
    os.utime(source / "model.safetensors", (1, 1))
    assert key(source) == before
    os.utime(source / "model.safetensors", (2, 2))
    assert key(source) != before


def test_a_folder_full_of_files_has_no_fingerprint(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_BYTES", 1000)
    assert kept.fingerprint(source, LIBRARIES, 1) is None


# Tokenizers ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    usual(["shipped", "qwen", "mistral-v1", "mistral-v1-legacy", "tekken"], "shipped"),
)
def test_a_tokenizer_that_was_kept_is_the_one_that_was_loaded(name: Name | Literal["shipped"], cache: Path) -> None:
    path = str(shipped_tokenizer() if name == "shipped" else vocabulary(name))
    first, backend = loaded.load(path, trust_remote_code=False)
    assert len(list(cache.iterdir())) == 1
    second, again = loaded.load(path, trust_remote_code=False)
    assert second == first
    assert again.to_str() == backend.to_str() == first.tokenizer_json
    assert [again.encode(text).ids for text in loaded.PROBES] == first.probes
    assert Tokenizer(backend).fingerprint == Tokenizer.load(path).fingerprint == first.fingerprint


def test_a_changed_folder_is_loaded_anew(source: Path, cache: Path) -> None:
    """Ids that are another vocabulary's must never be sent."""
    made = json.loads((source / "tokenizer.json").read_text())
    (source / "tokenizer.json").write_text(json.dumps(made))  # as it is written below: of the same size
    first = Tokenizer.load(str(source))
    spelled, fingerprint = first.vocabulary.spell([1000]), first.fingerprint
    vocab = made["model"]["vocab"]
    one, other = (next(token for token, number in vocab.items() if number == wanted) for wanted in (1000, 1001))
    vocab[one], vocab[other] = 1001, 1000
    (source / "tokenizer.json").write_text(json.dumps(made))
    changed = Tokenizer.load(str(source))
    vocabulary = changed.vocabulary
    assert changed.fingerprint != fingerprint
    assert (vocabulary.spell([1001]), vocabulary.spell([1000]) == spelled) == (spelled, False)
    assert len(list(cache.iterdir())) == 2


def test_a_folder_that_changes_while_it_is_loaded_is_not_kept(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = loaded._asked

    def changed_meanwhile(path: str, trust_remote_code: bool) -> object:
        found = asked(path, trust_remote_code)
        (source / "config.json").write_text("{}")
        return found

    monkeypatch.setattr(loaded, "_asked", changed_meanwhile)
    loaded.load(str(source), trust_remote_code=False)
    assert not cache.exists()


def test_what_foreign_code_loads_is_not_kept(source: Path, cache: Path) -> None:
    loaded.load(str(source), trust_remote_code=True)
    assert not cache.exists()


START = """
import sys
from router.app import create_app
from router.config import RadixConfig, RouterConfig
create_app(RouterConfig(radix=RadixConfig(tokenizer_path=sys.argv[1])))
print("transformers" in sys.modules)
"""


@pytest.mark.slow  # two starts
def test_a_second_start_does_without_transformers(source: Path) -> None:
    """That takes a second of a processor. It is imported behind the start, for chat templates."""
    started = [
        subprocess.run([sys.executable, "-c", START, str(source)], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert started == ["True\n", "False\n"]
