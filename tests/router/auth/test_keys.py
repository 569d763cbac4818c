"""ApiKeys, the tenants they name, and what each may do."""

from __future__ import annotations

import pytest

from router.auth.keys import ApiKeys
from router.errors import BadRequestError
from router.http.request_state import ANYBODY, Caller, request_state


def test_no_keys_ask_for_none() -> None:
    assert not ApiKeys()
    assert (
        request_state({}).caller
        == request_state({"state": {}}).caller
        == ANYBODY
        == Caller("", admin=True, confined=False)
    )


def test_a_key_names_its_tenant() -> None:
    """Several keys may name one, and a key without a name is a tenant of its own."""
    keys = ApiKeys(["team.a:one", "team.a:two", "b_-9:three", "four"])
    found = [keys.identify(key) for key in (b"one", b"two", b"three", b"four")]
    names = [caller.tenant for caller in found if caller is not None]
    assert names[:3] == ["team.a", "team.a", "b_-9"]
    assert names[3].startswith("key-")
    assert "four" not in names[3]
    assert keys.tenants == ("team.a", "b_-9", names[3])
    assert ApiKeys(["four"]).tenants == (names[3],)  # the same after a restart


@pytest.mark.parametrize("key", [b"", b"on", b"one ", b"team.a:one", b"ONE", b"\xff"])
def test_nobodys_key(key: bytes) -> None:
    assert ApiKeys(["team.a:one"], ["all"]).identify(key) is None


def test_what_is_in_front_of_the_first_colon_is_a_name_if_it_can_be_one() -> None:
    keys = ApiKeys(["a:b:c", "not a name:d".replace(" ", "/")])
    assert keys.identify(b"b:c") == Caller("a", admin=True, confined=True)
    assert keys.identify(b"not/a/name:d") is not None


def test_without_an_admin_key_every_key_changes_the_fleet() -> None:
    """But names only what is its own, if there are others."""
    assert ApiKeys(["a:1", "a:2"]).identify(b"1") == Caller("a", admin=True, confined=False)
    assert ApiKeys(["a:1", "b:2"]).identify(b"1") == Caller("a", admin=True, confined=True)


def test_with_an_admin_key_only_that_one_does() -> None:
    keys = ApiKeys(["a:1"], ["x", "y"])
    assert keys.identify(b"1") == Caller("a", admin=False, confined=True)
    assert keys.identify(b"x") == keys.identify(b"y") == Caller("", admin=True, confined=False)
    assert keys.anonymous() is None


def test_with_nothing_but_an_admin_key_others_need_none() -> None:
    """They share what the admin generates, for there is no tenant."""
    keys = ApiKeys([], ["x"])
    assert keys
    assert keys.anonymous() == Caller("", admin=False, confined=True)


@pytest.mark.parametrize(
    ("api", "admin", "several"),
    [
        ((), (), False),
        (("a",), (), False),
        (("a:1", "a:2"), (), False),
        ((), ("x", "y"), False),
        (("a:1", "b:2"), (), True),
        (("a:1",), ("x",), True),
    ],
)
def test_whether_there_are_several(api: tuple[str, ...], admin: tuple[str, ...], several: bool) -> None:
    """An admin generates for nobody, and so beside a tenant."""
    assert ApiKeys(api, admin).several is several


@pytest.mark.parametrize(
    ("api", "admin", "says"),
    [
        (("",), (), "--api-key"),
        (("a:",), (), "--api-key"),
        (("a:b c",), (), "--api-key"),
        (("a:k\n",), (), "--api-key"),
        (("schlüssel",), (), "--api-key"),
        ((), ("",), "--admin-key"),
        ((), ("x y",), "--admin-key"),
        (("a:1", "b:1"), (), "the same key"),
        (("a:1", "1"), (), "the same key"),
        (("a:1",), ("1",), "an admin key is also"),
    ],
)
def test_keys_that_cannot_be(api: tuple[str, ...], admin: tuple[str, ...], says: str) -> None:
    """No message gives a key away."""
    with pytest.raises(BadRequestError, match=says) as raised:
        ApiKeys(api, admin)
    assert "b c" not in str(raised.value)
    assert "schl" not in str(raised.value)


def test_a_key_may_be_given_twice() -> None:
    assert ApiKeys(["a:1", "a:1"], ["x", "x"]).tenants == ("a",)
