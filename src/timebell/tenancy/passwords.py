"""Passwords of the dashboard, kept as scrypt (RFC 7914) of the password and a salt of their own.

32 MiB and three passes, as the OWASP password storage cheat sheet has it for scrypt. What is stored names its
parameters, so that they can rise later.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from hashlib import scrypt

from timebell.errors import InvalidInput

N, R, P = 2**15, 8, 3
MEMORY = 64 * 1024 * 1024
SHORTEST, LONGEST = 12, 200


def check(password: str) -> str:
    """Raises InvalidInput (PASSWORD_UNFIT). Length is all that counts (NIST SP 800-63B, 3.1.1.2)."""
    if not SHORTEST <= len(password) <= LONGEST:
        raise InvalidInput(
            f"A password has {SHORTEST} to {LONGEST} characters.", code="PASSWORD_UNFIT",
            fix="Use some words, or what a password manager makes.",
        )  # fmt: skip
    return password


def stored(password: str) -> str:
    """What is kept of a password. Takes a few hundred milliseconds on purpose."""
    salt = secrets.token_bytes(16)
    return f"scrypt${N}${R}${P}${_text(salt)}${_text(_derived(password, salt, N, R, P))}"


def matches(kept: str | None, password: str) -> bool:
    """Whether this is the password; for None, the same work and False."""
    if kept is None:
        _derived(password, b"0" * 16, N, R, P)
        return False
    _, n, r, p, salt, wanted = kept.split("$")
    found = _derived(password, base64.b64decode(salt), int(n), int(r), int(p))
    return hmac.compare_digest(found, base64.b64decode(wanted))


def _derived(password: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    return scrypt(password.encode(errors="replace"), salt=salt, n=n, r=r, p=p, maxmem=MEMORY, dklen=32)


def _text(given: bytes) -> str:
    return base64.b64encode(given).decode()
