"""Sign webhooks: Standard Webhooks 1.0."""

from __future__ import annotations

import base64
import binascii
import hmac
import os
from collections.abc import Iterable
from datetime import datetime

from timebell.errors import InvalidInput

CREATE_SIGNING_KEY_FIX = "To create one: echo whsec_$(openssl rand -base64 32)"


def signing_keys(secrets: Iterable[str]) -> list[bytes]:
    """Decode signing secrets to keys. Raises InvalidInput (INVALID_SIGNING_SECRET)."""
    return [_decode_secret(secret) for secret in secrets if secret]


def new_signing_secret() -> str:
    """Generate a random signing secret of 32 bytes."""
    return f"whsec_{base64.b64encode(os.urandom(32)).decode()}"


def _decode_secret(secret: str) -> bytes:
    """Decode a Standard Webhooks secret: `whsec_` and the base64 of 24 to 64 bytes. Errors never contain the secret."""
    prefix, _, encoded = secret.partition("_")
    try:
        key = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if prefix != "whsec" or not 24 <= len(key) <= 64:
        raise InvalidInput(
            "A webhook signing secret must be whsec_ and the base64 of 24 to 64 bytes.",
            code="INVALID_SIGNING_SECRET",
            fix=CREATE_SIGNING_KEY_FIX,
        )
    return key


def sign_webhook(key: bytes, message: str, at: datetime, body: bytes) -> str:
    """Sign message id, timestamp and body with HMAC-SHA256 (Standard Webhooks 1.0)."""
    signed = b"%s.%d.%s" % (message.encode(), int(at.timestamp()), body)
    return f"v1,{base64.b64encode(hmac.digest(key, signed, 'sha256')).decode()}"
