"""API keys without a store: their text and digests, and when and from where they may be used."""

from __future__ import annotations

import hmac
import re
import zlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from timebell.errors import InvalidInput, Refused
from timebell.tenancy import keys
from timebell.tenancy.keys import Key
from timebell.tenancy.roles import Role

NOW = datetime(2027, 3, 1, 12, tzinfo=UTC)
MOMENT = timedelta(microseconds=1)


def key(**fields: Any) -> Key:
    return Key(id="0" * 12, tenant_id="acme", name="ci", role=Role.EDITOR, created_at=NOW, **fields)


def with_checksum(text: str) -> str:
    return f"{text}{zlib.crc32(text.encode()):08x}"


def test_a_key_expires_at_its_instant() -> None:
    assert key(expires_at=NOW).is_usable(NOW - MOMENT, None)
    assert not key(expires_at=NOW).is_usable(NOW, None)
    assert key().is_usable(NOW + timedelta(days=36_500), None)


def test_a_revoked_key_is_unusable_whatever_its_expiry() -> None:
    assert not key(revoked_at=NOW, expires_at=NOW + MOMENT).is_usable(NOW, None)


@pytest.mark.parametrize(
    ("address", "usable"),
    [
        ("192.0.2.0", True), ("192.0.2.255", True), ("192.0.3.0", False), ("2001:db8::7", True), ("2001:db9::", False),
        ("::ffff:192.0.2.1", True),  # an IPv4 client of an IPv6 socket
        ("::ffff:192.0.3.1", False), ("", False), (None, False), ("localhost", False),
    ],
)  # fmt: skip
def test_a_key_is_usable_only_from_its_networks(address: str | None, usable: bool) -> None:
    assert key(networks=("192.0.2.0/24", "2001:db8::/32")).is_usable(NOW, address) is usable
    assert key().is_usable(NOW, address)
    assert not key(networks=()).is_usable(NOW, address)


def test_a_key_is_permitted_its_scopes() -> None:
    assert key(scopes=("jobs",)).permits("jobs")
    assert not key(scopes=("jobs",)).permits("keys")
    assert not key(scopes=()).permits("jobs")
    assert key().permits("jobs")


def test_generated_keys_are_well_formed() -> None:
    (id_, text), (other, _) = keys.generate_key(), keys.generate_key()
    assert re.fullmatch(r"tb_live_[0-9a-f]{12}_[0-9a-f]{56}", text)
    assert keys.parse_key_id(text) == id_ != other


@pytest.mark.parametrize(
    ("text", "id_"),
    [
        (with_checksum("tb_live_abc_secret"), "abc"),
        (with_checksum("tb_live_abc_secret")[:-1] + "g", None),
        (with_checksum("xx_live_abc_secret"), None),
        (with_checksum("tb_live__secret"), None),
        (with_checksum("tb_live_abc"), None),
        (with_checksum("tb_live_abc_secret_more"), None),
        (with_checksum("tb_live_é_secret"), None),
        (with_checksum("tb_live_abc_" + "s" * 179), "abc"),  # 199 characters
        (with_checksum("tb_live_abc_" + "s" * 180), None),
        ("", None),
    ],
)
def test_the_id_is_read_from_well_formed_keys(text: str, id_: str | None) -> None:
    assert keys.parse_key_id(text) == id_


def test_a_digest_is_made_with_the_newest_secret_key() -> None:
    newest, oldest = (hmac.new(secret, b"tb_live_abc", "sha256").hexdigest() for secret in (b"new", b"old"))
    assert keys.digests("new, old", "tb_live_abc") == [newest, oldest]
    assert keys.digest("new, old", "tb_live_abc") == newest
    assert keys.digests_match(newest, newest)
    assert not keys.digests_match(newest, oldest)
    with pytest.raises(Refused) as refused:
        keys.digest(None, "tb_live_abc")
    assert refused.value.code == "SECRET_KEY_MISSING"


@pytest.mark.parametrize(
    ("check", "given", "result"),
    [
        (keys.check_networks, None, None),
        (keys.check_networks, ["192.0.2.7", "2001:DB8::/32"], ("192.0.2.7/32", "2001:db8::/32")),
        (keys.check_scopes, None, None),
        (keys.check_scopes, [], ()),
        (keys.check_scopes, ["keys", "jobs", "keys"], ("jobs", "keys")),
    ],
)
def test_networks_and_scopes_are_normalized(check: Callable[[Any], Any], given: Any, result: Any) -> None:
    assert check(given) == result


@pytest.mark.parametrize(
    ("check", "given", "code"),
    [
        (keys.check_networks, ["192.0.2.7/24"], "INVALID_NETWORKS"),
        (keys.check_networks, ["192.0.2.0/24", "localhost"], "INVALID_NETWORKS"),
        (keys.check_scopes, ["jobs", "nothing"], "INVALID_SCOPES"),
    ],
)
def test_invalid_networks_and_scopes_are_refused(check: Callable[[Any], Any], given: Any, code: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check(given)
    assert refused.value.code == code


def test_fingerprints_tell_secret_keys_apart_without_revealing_them() -> None:
    assert keys.fingerprints(None) == ()
    new, old = keys.fingerprints("new, old")
    assert (len(new), new != old, keys.fingerprints("old")) == (4, True, (old,))
