"""The token of an attempt: goes out with a delivery, and whoever brings it back may say what became of it.

It is the attempt's number and an HMAC-SHA-256 of job and number under the installation's secret key: any node can
check it, none has to keep it, and the next attempt has another one.
"""

from __future__ import annotations

import hmac

from timebell.errors import Refused
from timebell.tenancy.keys import digest, peppers


def token_of(secret: str | None, job_id: str, number: int) -> str:
    """The token of a job's attempt. Raises Refused (SECRET_KEY_MISSING)."""
    return f"{number}.{digest(secret, f'attempt {job_id} {number}')[:40]}"


def attempt_of(secret: str | None, job_id: str, token: str) -> int:
    """The number of the attempt that a token is of. Raises Refused (TOKEN_INVALID, SECRET_KEY_MISSING)."""
    number, _, _ = token.partition(".")
    known = number.isascii() and number.isdigit() and len(number) < 10
    asked = int(number) if known else 0
    right = [token_of(one, job_id, asked) for one in peppers(secret)] or [token_of(None, job_id, asked)]
    given = token.encode(errors="replace")
    if not [one for one in right if hmac.compare_digest(one.encode(), given)] or not known:
        raise Refused(
            "This token is not of an attempt at this job.", code="TOKEN_INVALID",
            fix="Send the timebell-token of the delivery, as it came.",
        )  # fmt: skip
    return int(number)
