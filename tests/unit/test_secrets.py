"""Secrets at rest: what is encrypted opens where it belongs, under the right key, and nowhere else."""

from __future__ import annotations

import base64
import sys

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from timebell.errors import Refused
from timebell.model.target import MASK, filled, masked, secret_names
from timebell.tenancy.secrets import KEY, Keyring

HERE = ("acme", "timebell_secrets", "stripe", "value", 1)


def sealed(value: str = "hunter2", place: tuple[str | int, ...] = HERE) -> tuple[Keyring, str, str, str]:
    ring = Keyring("first")
    wrapped = ring.new_data_key("acme")
    return ring, ring.newest, wrapped, ring.box("acme", ring.newest, wrapped).seal(value, place)


def test_s43_a_value_opens_at_its_place_alone() -> None:
    ring, by, wrapped, text = sealed()
    box = ring.box("acme", by, wrapped)
    assert box.open(text, HERE) == "hunter2"
    for at, other in enumerate(("umbrella", "timebell_targets", "paypal", "signing", 2)):
        elsewhere = (*HERE[:at], other, *HERE[at + 1 :])
        with pytest.raises(Refused) as refused:
            box.open(text, elsewhere)
        assert refused.value.code == "SECRET_UNREADABLE"
    with pytest.raises(Refused):  # the data key of one tenant is not that of another
        ring.box("umbrella", by, wrapped)


def test_s43_every_nonce_is_new_and_of_96_bits() -> None:
    ring, by, wrapped, _ = sealed()
    box = ring.box("acme", by, wrapped)
    texts = [base64.b64decode(box.seal("same", HERE).removeprefix("v1.")) for _ in range(200)]
    assert len({text[:12] for text in texts}) == 200
    assert {len(text) for text in texts} == {12 + len("same") + 16}
    assert len({ring.new_data_key("acme") for _ in range(50)}) == 50


@pytest.mark.parametrize("change", [lambda t: t[:-2] + b"xx", lambda t: t[:5], lambda t: b"", lambda t: b"\0" * len(t)])
def test_s43_what_was_changed_does_not_open(change: object) -> None:
    ring, by, wrapped, text = sealed()
    raw = base64.b64decode(text.removeprefix("v1."))
    broken = f"v1.{base64.b64encode(change(raw)).decode()}"  # type: ignore[operator]
    for given in (broken, "v2." + text[3:], text[3:], "", "v1.%%%"):
        with pytest.raises(Refused):
            ring.box("acme", by, wrapped).open(given, HERE)


def test_s44_a_secret_key_that_is_not_there_opens_nothing() -> None:
    _, by, wrapped, _ = sealed()
    for missing in (None, "", " , "):
        with pytest.raises(Refused) as refused:
            Keyring(missing)
        assert refused.value.code == "SECRET_KEY_MISSING"
    with pytest.raises(Refused) as refused:
        Keyring("second").box("acme", by, wrapped)
    assert refused.value.code == "SECRET_UNREADABLE"


def test_s44_a_data_key_is_wrapped_anew_and_the_values_stay() -> None:
    _, by, wrapped, text = sealed()
    both = Keyring("second,first")
    again = both.rewrap("acme", by, wrapped)
    alone = Keyring("second")
    assert again != wrapped
    assert alone.box("acme", both.newest, again).open(text, HERE) == "hunter2"
    with pytest.raises(Refused):
        Keyring("first").box("acme", both.newest, again)


def test_no_key_is_in_a_repr() -> None:
    assert "first" not in repr(Keyring("first"))


def test_options_are_filled_and_texts_are_masked() -> None:
    options = {"url": "https://x", "headers": {"a": {"secret": "k"}, "b": "plain"}, "list": [{"secret": "l"}],
               "not": {"secret": "k", "more": 1}}  # fmt: skip
    assert secret_names(options) == {"k", "l"}
    assert filled(options, {"k": "one", "l": "two"}) == {
        "url": "https://x", "headers": {"a": "one", "b": "plain"}, "list": ["two"], "not": {"secret": "k", "more": 1},
    }  # fmt: skip
    secrets = ('pass"word', "pass", "a-very-long-secret")
    told = {"a": ['x pass"word y', r'{"k": "pass\"word"}', "pass"], "n": 3, "pass": None}
    assert masked(told, secrets) == {"a": [f"x {MASK} y", f'{{"k": "{MASK}"}}', MASK], "n": 3, MASK: None}
    assert masked("cut off at a-very-lon", secrets) == f"cut off at {MASK}"
    assert masked("text", ()) == "text"


def test_s43_keys_are_derived_as_others_derive_them() -> None:
    derived = HKDF(SHA256(), KEY, None, b"timebell key id").derive(b"first")
    assert Keyring("first").newest == derived[:8].hex()


def test_without_the_library_nothing_is_sealed_and_who_has_no_secrets_does_not_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    ring = Keyring("nobody has used this one")
    assert len(ring.known) == 1
    with pytest.raises(Refused) as refused:
        ring.new_data_key("acme")
    assert (refused.value.code, "timebell[secrets]" in refused.value.fix) == ("SECRETS_UNAVAILABLE", True)
