from __future__ import annotations

from middleware_hub.media.stock import Lengths


def test_a_length_is_learned_once_and_must_agree() -> None:
    lengths = Lengths()
    assert lengths.get("s", "d") is None
    assert lengths.learn("s", "d", 391)
    assert lengths.learn("s", "d", 391)
    assert not lengths.learn("s", "d", 392)
    assert lengths.get("s", "d") == 391


def test_settings_keep_lengths_apart() -> None:
    lengths = Lengths()
    assert lengths.learn("s", "d", 391)
    assert lengths.learn("t", "d", 200)
    assert (lengths.get("s", "d"), lengths.get("t", "d")) == (391, 200)


def test_a_length_that_is_forgotten_can_be_learned_anew() -> None:
    lengths = Lengths()
    lengths.forget("s", "d")
    lengths.learn("s", "d", 391)
    lengths.forget("s", "d")
    assert lengths.get("s", "d") is None
    assert lengths.learn("s", "d", 392)


def test_the_least_recently_used_is_forgotten() -> None:
    lengths = Lengths(2)
    lengths.learn("s", "a", 1)
    lengths.learn("s", "b", 2)
    lengths.get("s", "a")
    lengths.learn("s", "c", 3)
    assert [lengths.get("s", digest) for digest in "abc"] == [1, None, 3]
    assert len(lengths) == 2
