"""Secrets at rest: a value is decrypted only at its own location and with its own key."""

from __future__ import annotations

import base64
import sys

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from timebell.errors import Refused
from timebell.tenancy.secrets import KEY_BYTES, Keyring

LOCATION = ("acme", "timebell_secrets", "stripe", "value", 1)


def encrypted_value(value: str = "hunter2", place: tuple[str | int, ...] = LOCATION) -> tuple[Keyring, str, str, str]:
    ring = Keyring("first")
    wrapped = ring.new_data_key("acme")
    return ring, ring.newest_key_id, wrapped, ring.cipher_for("acme", ring.newest_key_id, wrapped).encrypt(value, place)


def test_value_is_decrypted_only_at_its_own_location() -> None:
    ring, key_id, wrapped, text = encrypted_value()
    cipher = ring.cipher_for("acme", key_id, wrapped)
    assert cipher.decrypt(text, LOCATION) == "hunter2"
    for at, other in enumerate(("umbrella", "timebell_targets", "paypal", "signing", 2)):
        elsewhere = (*LOCATION[:at], other, *LOCATION[at + 1 :])
        with pytest.raises(Refused) as refused:
            cipher.decrypt(text, elsewhere)
        assert refused.value.code == "SECRET_UNREADABLE"
    with pytest.raises(Refused):  # the data key belongs to one tenant
        ring.cipher_for("umbrella", key_id, wrapped)


def test_every_nonce_is_unique_and_has_96_bits() -> None:
    ring, key_id, wrapped, _ = encrypted_value()
    cipher = ring.cipher_for("acme", key_id, wrapped)
    texts = [base64.b64decode(cipher.encrypt("same", LOCATION).removeprefix("v1.")) for _ in range(200)]
    assert len({text[:12] for text in texts}) == 200
    assert {len(text) for text in texts} == {12 + len("same") + 16}
    assert len({ring.new_data_key("acme") for _ in range(50)}) == 50


@pytest.mark.parametrize("change", [lambda t: t[:-2] + b"xx", lambda t: t[:5], lambda t: b"", lambda t: b"\0" * len(t)])
def test_modified_ciphertext_is_refused(change: object) -> None:
    ring, key_id, wrapped, text = encrypted_value()
    raw = base64.b64decode(text.removeprefix("v1."))
    broken = f"v1.{base64.b64encode(change(raw)).decode()}"  # type: ignore[operator]
    for text_to_open in (broken, "v2." + text[3:], text[3:], "", "v1.%%%"):
        with pytest.raises(Refused):
            ring.cipher_for("acme", key_id, wrapped).decrypt(text_to_open, LOCATION)


def test_missing_or_other_secret_key_decrypts_nothing() -> None:
    _, key_id, wrapped, _ = encrypted_value()
    for missing in (None, "", " , "):
        with pytest.raises(Refused) as refused:
            Keyring(missing)
        assert refused.value.code == "SECRET_KEY_MISSING"
    with pytest.raises(Refused) as refused:
        Keyring("second").cipher_for("acme", key_id, wrapped)
    assert refused.value.code == "SECRET_UNREADABLE"


def test_rewrapped_data_key_decrypts_existing_values() -> None:
    _, key_id, wrapped, text = encrypted_value()
    both = Keyring("second,first")
    again = both.rewrap("acme", key_id, wrapped)
    alone = Keyring("second")
    assert again != wrapped
    assert alone.cipher_for("acme", both.newest_key_id, again).decrypt(text, LOCATION) == "hunter2"
    with pytest.raises(Refused):
        Keyring("first").cipher_for("acme", both.newest_key_id, again)


def test_repr_contains_no_key() -> None:
    assert "first" not in repr(Keyring("first"))


def test_key_derivation_matches_hkdf_of_another_library() -> None:
    derived = HKDF(SHA256(), KEY_BYTES, None, b"timebell key id").derive(b"first")
    assert Keyring("first").newest_key_id == derived[:8].hex()


def test_missing_library_refuses_encryption_but_not_the_keyring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    ring = Keyring("a key used by no other test")
    assert len(ring.key_ids) == 1
    with pytest.raises(Refused) as refused:
        ring.new_data_key("acme")
    assert (refused.value.code, "timebell[secrets]" in refused.value.fix) == ("SECRETS_UNAVAILABLE", True)
