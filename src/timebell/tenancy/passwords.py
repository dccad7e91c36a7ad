"""Dashboard passwords, stored as scrypt hashes (RFC 7914) with a salt per password.

The parameters (32 MiB, p=3) follow the OWASP password storage cheat sheet. They are stored with each hash, so they can
be raised later.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from hashlib import scrypt

from timebell.errors import InvalidInput

SCRYPT_N, SCRYPT_R, SCRYPT_P = 2**15, 8, 3
SCRYPT_MAX_MEMORY_BYTES = 64 * 1024 * 1024
MIN_LENGTH, MAX_LENGTH = 12, 200


def check_length(password: str) -> str:
    """Return the password if its length is valid. Raises InvalidInput (INVALID_PASSWORD).

    Length is the only rule, as NIST SP 800-63B, section 3.1.1.2, recommends.
    """
    if not MIN_LENGTH <= len(password) <= MAX_LENGTH:
        raise InvalidInput(
            f"A password must have {MIN_LENGTH} to {MAX_LENGTH} characters.", code="INVALID_PASSWORD",
            fix="Use several words, or a password manager.",
        )  # fmt: skip
    return password


def hash_password(password: str) -> str:
    """Return the hash to store. Deliberately slow: a few hundred milliseconds."""
    salt = secrets.token_bytes(16)
    derived = _derive(password, salt, SCRYPT_N, SCRYPT_R, SCRYPT_P)
    return f"scrypt${SCRYPT_N}${SCRYPT_R}${SCRYPT_P}${_to_base64(salt)}${_to_base64(derived)}"


def verify(password_hash: str | None, password: str) -> bool:
    """Return whether the password matches. A `password_hash` of None takes equally long and returns False."""
    if password_hash is None:
        _derive(password, b"0" * 16, SCRYPT_N, SCRYPT_R, SCRYPT_P)
        return False
    _, n, r, p, salt, expected = password_hash.split("$")
    actual = _derive(password, base64.b64decode(salt), int(n), int(r), int(p))
    return hmac.compare_digest(actual, base64.b64decode(expected))


def _derive(password: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    return scrypt(password.encode(errors="replace"), salt=salt, n=n, r=r, p=p, maxmem=SCRYPT_MAX_MEMORY_BYTES, dklen=32)


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
