"""Time-based one-time passwords (RFC 6238) of authenticator apps, and recovery codes.

A secret has 160 random bits; a code has six digits, SHA-1 and steps of 30 seconds, which every authenticator app
supports. A recovery code has 80 random bits.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from datetime import datetime
from hashlib import sha256
from urllib.parse import quote, urlencode

SECRET_BYTES = 20
DIGITS = 6
STEP_SECONDS = 30
CLOCK_SKEW_STEPS = 1  # codes of the previous and the next step are accepted, too
RECOVERY_CODE_COUNT = 10
RECOVERY_CODE_BYTES = 10


def generate_secret() -> str:
    """Return a new secret in Base32, as authenticator apps take it."""
    return base64.b32encode(secrets.token_bytes(SECRET_BYTES)).decode()


def generate_code(secret: str, step: int) -> str:
    """Return the code of a step."""
    from cryptography.hazmat.primitives.hashes import SHA1
    from cryptography.hazmat.primitives.twofactor.hotp import HOTP

    return HOTP(base64.b32decode(secret), DIGITS, SHA1()).generate(step).decode()  # noqa: S303  # RFC 6238


def step_at(instant: datetime) -> int:
    """Return the number of the step that contains an instant."""
    return int(instant.timestamp()) // STEP_SECONDS


def find_step(secret: str, code: str, now: datetime, last_step: int | None) -> int | None:
    """Return the step of a code, or None if it is wrong. A code up to `last_step` was used before and is wrong."""
    entered, current, found = "".join(code.split()).encode(errors="replace"), step_at(now), None
    for step in range(current - CLOCK_SKEW_STEPS, current + CLOCK_SKEW_STEPS + 1):
        is_equal = hmac.compare_digest(generate_code(secret, step).encode(), entered)
        if is_equal and (last_step is None or step > last_step):
            found = step
    return found


def provisioning_url(secret: str, account: str, issuer: str) -> str:
    """Return the URL for an authenticator app, usually as a QR code. `issuer` names the installation."""
    label = quote(f"{issuer.replace(':', ' ')}:{account.replace(':', ' ')}", safe="")
    return f"otpauth://totp/{label}?{urlencode({'secret': secret, 'issuer': issuer}, quote_via=quote)}"


def generate_recovery_codes() -> list[str]:
    """Return new recovery codes, such as `k3vn-7qpa-xw2d-m5rt`."""
    texts = [base64.b32encode(secrets.token_bytes(RECOVERY_CODE_BYTES)).decode() for _ in range(RECOVERY_CODE_COUNT)]
    return ["-".join(text[at : at + 4] for at in range(0, len(text), 4)).lower() for text in texts]


def recovery_code_digest(code: str) -> str:
    """Return the digest to store for a recovery code, regardless of case, spaces and hyphens."""
    return sha256("".join(filter(str.isalnum, code)).upper().encode(errors="replace")).hexdigest()
