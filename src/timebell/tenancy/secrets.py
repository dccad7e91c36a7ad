"""Envelope encryption of secrets at rest with AES-256-GCM.

Each tenant has a random data key that encrypts its secrets. The data key is stored encrypted ("wrapped") under a key
derived from the installation's secret key (TIMEBELL_SECRET_KEY). The location of a value (tenant, table, row, column,
version) is authenticated with it, so a value copied to another row cannot be decrypted. During a rotation the secret
key is a list, newest first: data keys are rewrapped under the first one, and the encrypted values stay unchanged.

Nonces are 96 random bits (NIST SP 800-38D); wrapping keys are derived with HKDF (RFC 5869).
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

NONCE_BYTES = 12
KEY_BYTES = 32
FORMAT_VERSION = "v1"
SecretLocation = Sequence[str | int]
"""Location of a stored value: tenant, table, row, column, version."""


def split_secret_keys(secret_key: str | None) -> list[str]:
    """Split TIMEBELL_SECRET_KEY at commas, newest key first. More than one is set during a rotation."""
    return [key for key in (part.strip() for part in (secret_key or "").split(",")) if key]


class Keyring:
    """Wrapping keys of this installation.

    Raises Refused: SECRET_KEY_MISSING on construction, SECRETS_UNAVAILABLE on first use without `cryptography`.
    """

    def __init__(self, secret_key: str | None) -> None:
        self._by_id: dict[str, _WrappingKey] = {}
        secrets = split_secret_keys(secret_key)
        if not secrets:
            raise Refused(
                "Secrets and named targets are encrypted, and this installation has no secret key.",
                code="SECRET_KEY_MISSING",
                fix="Set TIMEBELL_SECRET_KEY on every node: python -c 'import secrets; print(secrets.token_hex(32))'",
            )
        keys = [_WrappingKey(secret) for secret in secrets]
        self._newest_key = keys[0]
        self._by_id |= {key.id: key for key in keys}

    def __repr__(self) -> str:
        return f"Keyring({', '.join(self._by_id)})"

    @property
    def newest_key_id(self) -> str:
        """Fingerprint of the key that wraps new data keys."""
        return self._newest_key.id

    @property
    def key_ids(self) -> list[str]:
        """Fingerprints of all keys configured on this node."""
        return list(self._by_id)

    def new_data_key(self, tenant_id: str) -> str:
        """Generate a data key for a tenant and return it wrapped."""
        return _encrypt(self._newest_key.aead, os.urandom(KEY_BYTES), _data_key_location(tenant_id))

    def rewrap(self, tenant_id: str, wrapped_by: str, wrapped: str) -> str:
        """Return the same data key wrapped with the newest key. Raises Refused (SECRET_UNREADABLE)."""
        return _encrypt(
            self._newest_key.aead, self._unwrap(tenant_id, wrapped_by, wrapped), _data_key_location(tenant_id)
        )

    def cipher_for(self, tenant_id: str, wrapped_by: str, wrapped: str) -> TenantCipher:
        """Return the cipher of a tenant. Raises Refused (SECRET_UNREADABLE)."""
        return TenantCipher(self._unwrap(tenant_id, wrapped_by, wrapped))

    def _unwrap(self, tenant_id: str, wrapped_by: str, wrapped: str) -> bytes:
        key = self._by_id.get(wrapped_by)
        if key is None:
            raise _unreadable_error(
                f"The secrets of tenant {tenant_id} are encrypted with a secret key that this node does not have."
            )
        return _decrypt(key.aead, wrapped, _data_key_location(tenant_id))


@lru_cache(maxsize=4)
def keyring(secret_key: str | None) -> Keyring:
    """Return the cached keyring of a secret key. Raises the errors of Keyring."""
    return Keyring(secret_key)


class TenantCipher:
    """Encrypts and decrypts the values of one tenant."""

    def __init__(self, key: bytes) -> None:
        self._aead = _aes_gcm(key)

    def encrypt(self, value: str, location: SecretLocation) -> str:
        """Return the encrypted value as text to store."""
        return _encrypt(self._aead, value.encode(), location)

    def decrypt(self, encrypted: str, location: SecretLocation) -> str:
        """Decrypt a stored value. Raises Refused (SECRET_UNREADABLE) if it was modified or has another location."""
        return _decrypt(self._aead, encrypted, location).decode()


class _WrappingKey:
    """Key that wraps data keys, with a fingerprint that does not reveal it."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self.id = _derive(secret, b"timebell key id")[:8].hex()

    @cached_property
    def aead(self) -> Any:
        return _aes_gcm(_derive(self._secret, b"timebell data keys"))


def _data_key_location(tenant_id: str) -> SecretLocation:
    return (tenant_id, "timebell_data_keys", tenant_id, "wrapped", 1)


def _encrypt(aead: Any, plain: bytes, location: SecretLocation) -> str:
    nonce = os.urandom(NONCE_BYTES)
    encrypted = nonce + aead.encrypt(nonce, plain, _associated_data(location))
    return f"{FORMAT_VERSION}.{base64.b64encode(encrypted).decode()}"


def _decrypt(aead: Any, encrypted: str, location: SecretLocation) -> bytes:
    from cryptography.exceptions import InvalidTag

    version, _, encoded = encrypted.partition(".")
    try:
        if version != FORMAT_VERSION:
            raise ValueError(version)
        data = base64.b64decode(encoded, validate=True)
        return bytes(aead.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], _associated_data(location)))
    except (InvalidTag, ValueError) as error:
        raise _unreadable_error("A secret cannot be decrypted: it was modified, or belongs to another row.") from error


def _associated_data(location: SecretLocation) -> bytes:
    return json.dumps(list(location)).encode()


def _aes_gcm(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as missing:
        raise Refused(
            "Secrets require the package cryptography, which is not installed.", code="SECRETS_UNAVAILABLE",
            fix='Install it: pip install "timebell[secrets]"',
        ) from missing  # fmt: skip
    return AESGCM(key)


def _derive(secret: str, purpose: bytes) -> bytes:
    """HKDF (RFC 5869) with SHA-256, no salt, and one block of output."""
    extracted = hmac.digest(bytes(KEY_BYTES), secret.encode(), "sha256")
    return hmac.digest(extracted, purpose + b"\x01", "sha256")


def _unreadable_error(message: str) -> Refused:
    return Refused(
        message, code="SECRET_UNREADABLE", fix="Configure every secret key in use on this node, newest first."
    )
