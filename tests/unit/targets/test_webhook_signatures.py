"""Signatures of webhooks: Standard Webhooks 1.0."""

from __future__ import annotations

import base64
import hashlib
import hmac
from datetime import UTC, datetime

import pytest

from timebell.errors import InvalidInput
from timebell.targets.webhook_signatures import new_signing_secret, sign_webhook, signing_keys


def encoded(key: bytes) -> str:
    return base64.b64encode(key).decode()


def test_message_timestamp_and_body_are_signed() -> None:
    key, at = b"k" * 32, datetime(2027, 3, 1, 12, 0, 0, 999_999, tzinfo=UTC)
    signed = f"msg_1.{int(datetime(2027, 3, 1, 12, tzinfo=UTC).timestamp())}.".encode() + b'{"a": 1}\xff'
    signature = encoded(hmac.new(key, signed, hashlib.sha256).digest())
    assert sign_webhook(key, "msg_1", at, b'{"a": 1}\xff') == f"v1,{signature}"


@pytest.mark.parametrize("size", [24, 32, 64])
def test_secrets_of_24_to_64_bytes_are_keys(size: int) -> None:
    assert signing_keys([f"whsec_{encoded(b'k' * size)}", "", f"whsec_{encoded(b'l' * size)}"]) == [
        b"k" * size, b"l" * size,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "secret",
    [f"whsec_{encoded(b'k' * 23)}", f"whsec_{encoded(b'k' * 65)}", encoded(b"k" * 32), f"wh_{encoded(b'k' * 32)}",
     f"whsec_{'?' * 32}", f"whsec_?{encoded(b'k' * 32)}", f"whsec_{encoded(b'k' * 32)}é", "whsec_", "whsec"],
)  # fmt: skip
def test_other_secrets_are_refused_without_being_shown(secret: str) -> None:
    with pytest.raises(InvalidInput, match=r"^A webhook signing secret must be whsec_ .*openssl rand") as refused:
        signing_keys([secret])
    assert refused.value.code == "INVALID_SIGNING_SECRET"
    assert "kkk" not in str(refused.value)
    assert encoded(b"kkk") not in str(refused.value)


def test_a_new_secret_has_32_random_bytes() -> None:
    secrets = {new_signing_secret() for _ in range(20)}
    assert len(secrets) == 20
    assert {len(key) for key in signing_keys(secrets)} == {32}
