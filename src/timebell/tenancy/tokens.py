"""Attempt tokens: sent with a delivery; an external worker presents its token to report the result.

A token is the attempt number and an HMAC-SHA-256 of job id and attempt number under the installation's secret key. Any
node can verify it without storing it, and each attempt has its own.
"""

from __future__ import annotations

import hmac

from timebell.errors import Refused
from timebell.tenancy.keys import digest
from timebell.tenancy.secrets import split_secret_keys


def attempt_token(secret: str | None, job_id: str, attempt: int) -> str:
    """Return the token of an attempt. Raises Refused (SECRET_KEY_MISSING)."""
    subject = "Attempt tokens, with which workers and receivers report results,"
    return f"{attempt}.{digest(secret, f'attempt {job_id} {attempt}', subject=subject)[:40]}"


def verify_attempt_token(secret: str | None, job_id: str, token: str) -> int:
    """Return the attempt number of a valid token. Raises Refused (INVALID_TOKEN, SECRET_KEY_MISSING)."""
    number, _, _ = token.partition(".")
    is_number = number.isascii() and number.isdigit() and len(number) < 10
    attempt = int(number) if is_number else 0
    expected = [attempt_token(key, job_id, attempt) for key in split_secret_keys(secret)] or [
        attempt_token(None, job_id, attempt)
    ]
    presented = token.encode(errors="replace")
    if not [valid for valid in expected if hmac.compare_digest(valid.encode(), presented)]:
        raise Refused(
            "The token does not belong to an attempt of this job.", code="INVALID_TOKEN",
            fix="Send the timebell-token header of the delivery unchanged.",
        )  # fmt: skip
    return attempt
