"""Starts are what a worker would encode, tails gain nothing that a start gains, and boundaries are where both add up."""

from __future__ import annotations

import asyncio
import json
import shutil
import unicodedata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from middleware_hub.spans.chain import SpanFlag, TokenSpan, pack_ids
from middleware_hub.tokenizer.tokenizer import LONG_TEXT, Tokenizer
from router.config import SpecialTokens
from router.errors import BadRequestError
from tests.conftest import examples
from tests.middleware_hub.real import ALL, BYTE_LEVEL, added, recount, reference, texts, tokenizer
from tests.support.usual import usual
from tests.support.vocabularies import Name, load
from worker.models.ngram import shipped_tokenizer

slow = settings(
    deadline=None, max_examples=examples(80), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
WITH_BOS: tuple[Name, ...] = ("mistral-v1", "tekken", "mistral-v1-legacy")
SENTENCEPIECE: tuple[Name, ...] = ("mistral-v1", "mistral-v1-legacy")


# Starts ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_start_is_encoded_as_a_worker_encodes_it(name: Name) -> None:
    """`AutoTokenizer(text)`, but for a BOS that the text spells already."""
    made, worker = tokenizer(name), reference(name)

    @slow
    @given(texts(name))
    @example("Hello world")
    @example(" Hello")
    @example("<s>Hello")
    @example("<s><s>Hello")
    @example("<s>")
    def check(text: str) -> None:
        expected = list(worker(text)["input_ids"])
        if made.bos and expected[:2] == made.bos * 2:
            expected = expected[1:]
        assert made.encode_start(text) == expected

    check()


@pytest.mark.parametrize("name", WITH_BOS)
def test_a_bos_that_the_text_spells_is_not_doubled(name: Name) -> None:
    made = tokenizer(name)
    spelled = made.encode_start("<s>Hello")
    assert spelled[:1] == made.bos
    assert spelled.count(made.bos[0]) == 1
    assert made.encode_start("Hello")[:1] == made.bos
    assert made.encode_start("<s><s>Hello")[:2] == made.bos * 2, "two that the text spells are the text's own"


@pytest.mark.parametrize("name", usual(ALL, "mistral-v1"))
def test_modes_of_adding_special_tokens(name: Name) -> None:
    bare = load(name)
    bos = [] if name == "qwen" else [1]
    for text in ("Hello", " Hello", "<s>Hello", "Hello</s>", "\n", "😀"):
        plain = bare.encode(text, add_special_tokens=False).ids
        assert tokenizer(name, "never").encode_start(text) == plain
        assert tokenizer(name, "always").encode_start(text) == bos + plain
        doubled = text.startswith("<s>") and bool(bos)
        assert tokenizer(name, "auto").encode_start(text) == (plain if doubled else bos + plain)


@pytest.mark.parametrize("name", usual(ALL, "mistral-v1"))
@pytest.mark.parametrize("mode", ["auto", "always", "never"])
def test_nothing_is_appended_to_a_start(name: Name, mode: SpecialTokens) -> None:
    plain = list(reference(name)("Hello", add_special_tokens=False)["input_ids"])
    ids = tokenizer(name, mode).encode_start("Hello")
    assert ids[-len(plain) :] == plain
    assert ids[: -len(plain)] in ([], tokenizer(name).bos)


def test_a_tokenizer_that_appends_an_eos_has_no_part_of_it_in_a_start() -> None:
    """Whatever the post-processor puts behind a text would end the prompt."""
    from tokenizers import processors

    backend = Backend.from_str(load("tekken").to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<s>:0 $A:0 </s>:0", pair="<s>:0 $A:0 $B:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made = Tokenizer(backend)
    assert made.bos == [1]
    assert made.encode_start("Hello") == load("tekken").encode("Hello").ids


# Tails -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_tail_gains_no_bos_and_no_dummy_space(name: Name) -> None:
    """Its ids spell the text and nothing else (in NFC, where the tokenizer makes it so)."""
    made = tokenizer(name)

    @slow
    @given(texts(name))
    @example("Hello")
    @example(" Hello")
    @example("=1")
    def check(text: str) -> None:
        expected = unicodedata.normalize("NFC", text) if name == "qwen" else text
        if name == "qwen" and any(literal in text for literal in added(name).values()):
            return  # normalized by section; `test_a_boundary...` has these
        ids = made.encode_tail(text)
        assert recount(name, ids)[0] == (expected.replace("▁", " ") if name in SENTENCEPIECE else expected)

    check()


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_hello_with_and_without_a_space_are_the_same_start_and_not_the_same_tail(name: Name) -> None:
    made = tokenizer(name)
    hello = load(name).token_to_id("▁Hello")
    assert made.encode_start("Hello") == [1, hello]
    assert made.encode_tail(" Hello") == [hello]
    assert made.encode_tail("Hello") == [load(name).token_to_id("Hello")]


@pytest.mark.parametrize("name", ["qwen", "tekken"])
def test_byte_level_tails_are_what_a_start_is_without_its_bos(name: Name) -> None:
    made = tokenizer(name)

    @slow
    @given(texts(name))
    def check(text: str) -> None:
        assert made.encode_tail(text) == load(name).encode(text, add_special_tokens=False).ids

    check()


@pytest.mark.slow
@pytest.mark.parametrize("section", ["normalizer", "pre_tokenizer"])
def test_privileges_are_found_through_nested_sequences(section: str) -> None:
    settings_ = json.loads(load("mistral-v1-legacy").to_str())
    if section == "normalizer":
        settings_["normalizer"] = {"type": "Sequence", "normalizers": [settings_["normalizer"]]}
    else:
        settings_["normalizer"] = None
        metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
        inner = {"type": "Sequence", "pretokenizers": [metaspace]}
        settings_["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [inner]}
    made = Tokenizer(Backend.from_str(json.dumps(settings_)))
    assert made.vocabulary.spell(made.encode_start("Hello")) == "<s> Hello"
    assert made.vocabulary.spell(made.encode_tail("Hello")) == "Hello"


# Boundaries: the proof obligation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_start_is_the_sum_of_its_parts_at_every_boundary(name: Name) -> None:
    """Context is reused up to such a place, so there it must make no difference. Searched for a counterexample."""
    made = tokenizer(name)
    known = [i for i in added(name) if made.vocabulary.last_boundary(TokenSpan(None, 0, 0, pack_ids([i]), 1), 1)]
    if name == "mistral-v1-legacy":
        assert known == [], "a dummy space before every section: nothing adds up"
        return
    assert known

    @settings(slow, max_examples=examples(250))
    @given(texts(name, max_chunks=5), st.sampled_from(known), texts(name, max_chunks=5))
    @example("", known[0], "")
    @example("", known[0], " ")
    @example(" ", known[0], "\n\n")
    @example("e", known[-1], "\u0301")
    @example("<", known[-1], "\u0338")
    def check(before: str, boundary: int, behind: str) -> None:
        literal = made.vocabulary.literal(boundary)
        whole = made.encode_start(before + literal + behind)
        assert whole == made.encode_start(before + literal) + made.encode_tail(behind)

    check()


@pytest.mark.parametrize("name", ALL)
def test_every_boundary_inside_an_aligned_context_is_a_place_to_cut(name: Name) -> None:
    """The ids up to there and the encoding of the text from its end on are the whole, also where NFC moved characters."""
    made = tokenizer(name)

    @settings(slow, max_examples=examples(150))
    @given(texts(name, max_chunks=10), st.booleans())
    def check(text: str, start: bool) -> None:
        if not text:
            return
        ids = made.encode_start(text) if start else made.encode_tail(text)
        aligned = made.align(ids, text, start=start)
        span = TokenSpan(None, 0, 0, pack_ids(ids), len(text), flags=aligned.flags, ends=aligned.ends)
        ends = made.vocabulary.ends(span)
        for count in {made.vocabulary.last_boundary(span, n) for n in range(len(ids) + 1)} - {0}:
            cut = int(ends[count - 1])
            assert text[:cut].endswith(made.vocabulary.literal(ids[count - 1]))
            assert ids[:count] + made.encode_tail(text[cut:]) == ids

    check()


def toy_backend(*tokens: AddedToken, special: bool = True, normalizer: normalizers.Normalizer | None = None) -> Backend:
    """Byte-level BPE without merges, and the added tokens that a test is about."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    (backend.add_special_tokens if special else backend.add_tokens)(list(tokens))
    return backend


def boundaries(made: Tokenizer) -> set[str]:
    return {
        made.vocabulary.literal(i)
        for i in range(len(made.vocabulary))
        if made.vocabulary.last_boundary(TokenSpan(None, 0, 0, pack_ids([i]), 1), 1)
    }


def plain(content: str, **options: bool) -> AddedToken:
    return AddedToken(content, **{"normalized": False, **options})


def test_added_tokens_that_touch_their_neighbours_are_no_boundaries() -> None:
    made = Tokenizer(
        toy_backend(plain("<a>"), plain("<l>", lstrip=True), plain("<r>", rstrip=True), plain("<w>", single_word=True))
    )
    assert boundaries(made) == {"<a>"}


def test_an_added_token_that_another_one_goes_on_from_is_no_boundary() -> None:
    assert boundaries(Tokenizer(toy_backend(plain("<a"), plain("<a>"), plain("<ab>"), plain("<b>")))) == {
        "<a>",
        "<ab>",
        "<b>",
    }


def test_normalized_added_tokens_are_boundaries_only_without_a_normalizer() -> None:
    tokens = [plain("<a>"), plain("<n>", normalized=True)]
    assert boundaries(Tokenizer(toy_backend(*tokens, normalizer=normalizers.NFC()))) == {"<a>"}
    assert boundaries(Tokenizer(toy_backend(*tokens))) == {"<a>", "<n>"}


@pytest.mark.parametrize(
    "normalizer",
    [normalizers.Prepend("▁"), normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("▁")])],
    ids=["prepend", "nested"],
)
def test_where_every_section_gains_a_dummy_space_there_are_no_boundaries(normalizer: normalizers.Normalizer) -> None:
    assert boundaries(Tokenizer(toy_backend(plain("<a>"), normalizer=normalizer))) == set()


def test_where_byte_level_adds_a_prefix_space_there_are_no_boundaries() -> None:
    backend = toy_backend(plain("<a>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    made = Tokenizer(backend)
    assert boundaries(made) == set()
    assert made.vocabulary.spell(made.encode_tail("x")) == "x"


@pytest.mark.parametrize(
    ("tokens", "before", "boundary", "behind"),
    [
        ([plain("|a"), plain("<|a|>")], "<", "|a", "|>"),
        ([plain("a<", normalized=True), plain("<b>")], "x", "a<", "b>"),
    ],
    ids=["a token inside another one", "a token that another one overlaps"],
)
def test_no_boundary_can_be_swallowed_by_an_added_token_around_it(
    tokens: list[AddedToken], before: str, boundary: str, behind: str
) -> None:
    """Starting to its left and ending to its right: leftmost wins. And what is not normalized is looked for first."""
    made = Tokenizer(toy_backend(*tokens, special=False))
    whole = made.encode_start(before + boundary + behind)
    parts = made.encode_start(before + boundary) + made.encode_tail(behind)
    assert whole == parts or boundary not in boundaries(made)


# The texts of ids that clients send ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", usual(ALL, "mistral-v1"))
@pytest.mark.parametrize("mode", ["auto", "always", "never"])
def test_ids_of_a_text_spell_that_text(name: Name, mode: SpecialTokens) -> None:
    """Without the BOS and the dummy space that the text gained when a client encoded it."""
    made, client = tokenizer(name, mode), reference(name)
    for text in ("Hello", "Hello world\n", "é😀", "x", "=1"):
        assert made.spell_prompt(list(client(text)["input_ids"])) == text


@pytest.mark.parametrize("name", ALL)
def test_special_tokens_of_given_ids_are_spelled(name: Name) -> None:
    made = tokenizer(name)
    other = next(i for i in sorted(added(name)) if i not in made.bos)
    ids = [*made.encode_start("a"), other, *made.encode_tail("b")]
    assert made.spell_prompt(ids) == f"a{made.vocabulary.literal(other)}b"


@pytest.mark.parametrize("name", WITH_BOS)
def test_only_one_leading_bos_of_given_ids_is_unspelled(name: Name) -> None:
    made = tokenizer(name)
    tail = made.encode_tail("b")
    assert made.spell_prompt([1, 1, *tail]) == "<s>b"
    assert made.spell_prompt([*tail, 1]) == "b<s>"
    assert made.spell_prompt([1]) == ""


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_a_leading_space_of_byte_level_ids_is_the_texts_own(name: Name) -> None:
    made = tokenizer(name)
    assert made.spell_prompt(made.encode_start(" Hello")) == " Hello"


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_without_a_bos_given_ids_keep_their_leading_space(name: Name) -> None:
    """They may be the middle of something: only behind a BOS is it known to be a dummy."""
    assert tokenizer(name).spell_prompt(tokenizer(name).encode_tail(" Hello")) == " Hello"


# Aligning contexts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_an_encoded_text_is_aligned_with_itself(name: Name) -> None:
    """Ends never fall and reach the end; where ids spell the text, they are what a recount says."""
    made = tokenizer(name)

    @settings(slow, max_examples=examples(120))
    @given(texts(name), st.booleans())
    @example("e\u0301", True)
    @example("<s>", True)
    @example(" ", True)
    @example("▁", True)
    @example("\ufffd x", True)
    def check(text: str, start: bool) -> None:
        if not text:
            return
        ids = made.encode_start(text) if start else made.encode_tail(text)
        aligned = made.align(ids, text, start=start)
        assert not aligned.flags & (SpanFlag.WHOLE | SpanFlag.MISMATCH)
        span = TokenSpan(None, 0, 0, pack_ids(ids), len(text), flags=aligned.flags, ends=aligned.ends)
        ends = made.vocabulary.ends(span).tolist()
        assert ends == sorted(ends)
        assert ends[-1] == len(text)
        assert ends[0] >= 0
        spelled, counted = recount(name, ids)
        if spelled.endswith(text) and len(spelled) - len(text) == (3 if aligned.flags & SpanFlag.BOS else 0) + bool(
            aligned.flags & SpanFlag.DUMMY
        ):
            lead = len(spelled) - len(text)
            assert ends == [max(0, end - lead) for end in counted]

    check()


@pytest.mark.slow  # a vocabulary with all entries; the others cut such texts, too, with those that `make test` has
def test_a_normalized_text_is_cut_where_its_own_characters_end() -> None:
    """NFC makes two characters one: the offsets of the tokenizer tell where that is in the text that was sent."""
    made = tokenizer("qwen-whole")

    @settings(slow, max_examples=examples(120))
    @given(
        st.lists(
            st.sampled_from(["e\u0301", "A\u030a", "a", " ", "\u1100\u1161", "o\u0302\u0301", "你", "\n"]), min_size=1
        )
    )
    def check(parts: list[str]) -> None:
        text = "".join(parts)
        ids = made.encode_start(text)
        aligned = made.align(ids, text, start=True)
        span = TokenSpan(None, 0, 0, pack_ids(ids), len(text), flags=aligned.flags, ends=aligned.ends)
        ends = made.vocabulary.ends(span).tolist()
        for k, end in enumerate(ends[:-1]):
            if end < ends[k + 1]:
                assert unicodedata.normalize("NFC", text[:end]) == recount("qwen-whole", ids[: k + 1])[0]

    check()


# Loading -------------------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_tokenizer_is_told_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match=r"--tokenizer-path .*no tokenizer could be loaded"):
        Tokenizer.load(str(tmp_path))


def test_a_folder_that_is_not_there_is_not_taken_for_a_hub_id(tmp_path: Path) -> None:
    for path in (str(tmp_path / "nope"), "./nope", "../nope/nope", "~/nope"):
        with pytest.raises(BadRequestError, match=r"--tokenizer-path .*nope: there is no such folder"):
            Tokenizer.load(path)
    # As for a folder that this user may not see: a system call fails with something else than "there is no such file".
    with pytest.raises(BadRequestError, match=r"--tokenizer-path .*x: File name too long"):
        Tokenizer.load(str(tmp_path / ("x" * 300)))


def test_a_file_is_not_taken_for_a_hub_id_and_its_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path / "tokenizer.json"), "tokenizer.json"):
        with pytest.raises(BadRequestError) as caught:
            Tokenizer.load(path)
        assert str(caught.value) == f"--tokenizer-path {path}: this is a file: give its folder, {tmp_path}"


def test_a_tokenizer_whose_pieces_are_not_known_is_refused() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(BadRequestError, match="WordPiece"):
        Tokenizer(backend)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ('{"vocab_size": 4224}', 4224),
        ('{"text_config": {"vocab_size": 5000}}', 5000),
        ('{"vocab_size": 100}', 4096),
        ('{"vocab_size": "many"}', 4096),
        ("{}", 4096),
    ],
)
def test_the_models_vocabulary_is_the_limit_where_it_is_larger(tmp_path: Path, config: str, size: int) -> None:
    folder = tmp_path / "model"
    shutil.copytree(shipped_tokenizer(), folder)
    (folder / "config.json").write_text(config)
    assert Tokenizer.load(str(folder)).vocabulary.size == size


def test_a_model_that_the_library_does_not_know_is_no_reason_for_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tokenizer of a new model loads without doubts about a class for its weights, which are not loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = shutil.copytree(shipped_tokenizer(), tmp_path / "tokenizer")
    (folder / "config.json").write_text('{"model_type": "newer_than_the_library"}')
    assert Tokenizer.load(str(folder)).vocabulary.size == 4096
    assert not caplog.records


def test_an_id_that_was_sampled_is_known_to_be_good_from_then_on() -> None:
    made = Tokenizer(toy_backend(plain("<a>")))
    assert made.vocabulary.size == 257
    made.vocabulary.learn([3, 300])
    assert made.vocabulary.size == 301
    made.vocabulary.learn([])
    made.vocabulary.learn([2])
    assert made.vocabulary.size == 301


def test_a_long_text_is_encoded_beside_the_event_loop_with_the_same_result() -> None:
    made = tokenizer("qwen")
    for text in ("short", "a long one, " * LONG_TEXT):
        assert asyncio.run(made.encode(text, start=True)) == made.encode_start(text)
        assert asyncio.run(made.encode(text, start=False)) == made.encode_tail(text)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("start", [True, False])
def test_packed_ids_are_those_of_the_list(name: Name, start: bool) -> None:
    made = tokenizer(name)

    @slow
    @given(texts(name))
    @example("<s>Hello")
    def check(text: str) -> None:
        ids = made.encode_start(text) if start else made.encode_tail(text)
        packed, aligned = asyncio.run(made.encode_aligned(text, start=start))
        assert packed == asyncio.run(made.encode_packed(text, start=start)) == pack_ids(ids)
        assert aligned == made.align(ids, text, start=start)

    check()


def test_truncation_and_padding_of_the_folder_are_not_for_us() -> None:
    backend = toy_backend(plain("<a>"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    assert Tokenizer(backend).encode_start("longer than four") == list(
        toy_backend(plain("<a>")).encode("longer than four").ids
    )


def test_a_word_that_a_single_word_token_could_begin_in_is_no_boundary() -> None:
    """Behind `[INST` the tail `foo` is no word of its own, which the encoder of a tail cannot see."""
    made = Tokenizer(toy_backend(plain("[INST"), plain("<a>"), plain("foo", single_word=True)))
    assert boundaries(made) == {"<a>"}


def test_a_text_that_a_normalizer_takes_away_is_no_token() -> None:
    made = Tokenizer(toy_backend(normalizer=normalizers.Replace("\u200b", "")))
    assert made.encode_tail("\u200b") == []
    assert made.align([], "\u200b", start=False).ends == b""


def test_added_tokens_are_decoded_like_others() -> None:
    """Gemma has runs of blanks among them; a special token keeps its name, which is what a text would spell."""
    words = {"<unk>": 0, "a": 1, "b": 2, "▁": 3}
    backend = Backend(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    backend.add_tokens([plain("▁▁▁▁")])
    backend.add_special_tokens([plain("<x▁y>")])
    made = Tokenizer(backend)
    blanks, special = backend.token_to_id("▁▁▁▁"), backend.token_to_id("<x▁y>")
    assert made.vocabulary.spell([1, blanks, 2]) == backend.decode([1, blanks, 2]) == "a    b"
    assert made.vocabulary.literal(special) == "<x▁y>"
