"""Secrets at rest: AES-256-GCM in an envelope.

Each tenant has a data key, chosen by chance, that encrypts its secrets; the data key is kept encrypted under a key
made of the installation's secret key (TIMEBELL_SECRET_KEY). What is encrypted says where it belongs (tenant, table,
row, column, version), so that a value moved to another row opens nothing. To rotate, the secret key is a list, the
newest first: data keys are wrapped anew under the first, and the values stay as they are.

The exchange of keys is AES-GCM with random nonces of 96 bits (NIST SP 800-38D); keys are derived by HKDF (RFC 5869).
"""

from __future__ import annotations

import base64
import hmac
import json
import os
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from timebell.errors import Refused
from timebell.tenancy.keys import peppers

NONCE = 12
KEY = 32
VERSION = "v1"
Place = Sequence[str | int]
"""Where a value belongs: tenant, table, row, column, version."""


class Keyring:
    """The keys of this installation. Raises Refused (SECRET_KEY_MISSING); using it, also SECRETS_UNAVAILABLE."""

    def __init__(self, secret_key: str | None) -> None:
        self._by_id: dict[str, _Wrapping] = {}
        given = peppers(secret_key)
        if not given:
            raise Refused(
                "Secrets and targets by name are encrypted, and this installation has no secret key.",
                code="SECRET_KEY_MISSING",
                fix="Set TIMEBELL_SECRET_KEY on every node: python -c 'import secrets; print(secrets.token_hex(32))'",
            )
        made = [_Wrapping(one) for one in given]
        self._newest = made[0]
        self._by_id |= {one.id: one for one in made}

    def __repr__(self) -> str:
        return f"Keyring({', '.join(self._by_id)})"

    @property
    def newest(self) -> str:
        """The fingerprint of the key that wraps what is new."""
        return self._newest.id

    @property
    def known(self) -> list[str]:
        """The fingerprints of all keys that are here."""
        return list(self._by_id)

    def new_data_key(self, tenant_id: str) -> str:
        """A data key for a tenant, wrapped."""
        return _seal(self._newest.aead, os.urandom(KEY), _of_data_key(tenant_id))

    def rewrap(self, tenant_id: str, wrapped_by: str, wrapped: str) -> str:
        """The same data key under the newest key. Raises Refused (SECRET_UNREADABLE)."""
        return _seal(self._newest.aead, self._unwrap(tenant_id, wrapped_by, wrapped), _of_data_key(tenant_id))

    def box(self, tenant_id: str, wrapped_by: str, wrapped: str) -> Box:
        """What encrypts and decrypts for a tenant. Raises Refused (SECRET_UNREADABLE)."""
        return Box(self._unwrap(tenant_id, wrapped_by, wrapped))

    def _unwrap(self, tenant_id: str, wrapped_by: str, wrapped: str) -> bytes:
        key = self._by_id.get(wrapped_by)
        if key is None:
            raise _unreadable(f"The secrets of the tenant {tenant_id} are under a secret key that this node has not.")
        return _open(key.aead, wrapped, _of_data_key(tenant_id))


@lru_cache(maxsize=4)
def keyring(secret_key: str | None) -> Keyring:
    """The keyring of a secret key. Raises Refused (SECRET_KEY_MISSING); using it, also SECRETS_UNAVAILABLE."""
    return Keyring(secret_key)


class Box:
    """Encrypts and decrypts the values of one tenant."""

    def __init__(self, key: bytes) -> None:
        self._aead = _aes(key)

    def seal(self, value: str, place: Place) -> str:
        """A value as it is stored."""
        return _seal(self._aead, value.encode(), place)

    def open(self, sealed: str, place: Place) -> str:
        """The inverse. Raises Refused (SECRET_UNREADABLE) for what was changed, or belongs elsewhere."""
        return _open(self._aead, sealed, place).decode()


class _Wrapping:
    """A key that wraps data keys, and its fingerprint, which says nothing of it."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self.id = _derive(secret, b"timebell key id")[:8].hex()

    @cached_property
    def aead(self) -> Any:
        return _aes(_derive(self._secret, b"timebell data keys"))


def _of_data_key(tenant_id: str) -> Place:
    return (tenant_id, "timebell_data_keys", tenant_id, "wrapped", 1)


def _seal(aead: Any, plain: bytes, place: Place) -> str:
    nonce = os.urandom(NONCE)
    sealed = nonce + aead.encrypt(nonce, plain, _bound(place))
    return f"{VERSION}.{base64.b64encode(sealed).decode()}"


def _open(aead: Any, sealed: str, place: Place) -> bytes:
    from cryptography.exceptions import InvalidTag

    version, _, encoded = sealed.partition(".")
    try:
        if version != VERSION:
            raise ValueError(version)
        data = base64.b64decode(encoded, validate=True)
        return bytes(aead.decrypt(data[:NONCE], data[NONCE:], _bound(place)))
    except (InvalidTag, ValueError) as broken:
        raise _unreadable("A secret cannot be decrypted: it was changed, or belongs to something else.") from broken


def _bound(place: Place) -> bytes:
    return json.dumps(list(place)).encode()


def _aes(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as missing:
        raise Refused(
            "Secrets need the library cryptography, which is not installed.", code="SECRETS_UNAVAILABLE",
            fix='Install it: pip install "timebell[secrets]"',
        ) from missing  # fmt: skip
    return AESGCM(key)


def _derive(secret: str, purpose: bytes) -> bytes:
    """HKDF (RFC 5869) with SHA-256, no salt, and one block of output."""
    extracted = hmac.digest(bytes(KEY), secret.encode(), "sha256")
    return hmac.digest(extracted, purpose + b"\x01", "sha256")


def _unreadable(why: str) -> Refused:
    return Refused(why, code="SECRET_UNREADABLE", fix="Give this node every secret key in use, the newest first.")
