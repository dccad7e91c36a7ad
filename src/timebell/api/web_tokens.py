"""Verification of JSON Web Tokens (RFC 7519) by joserfc: signature, issuer, audience and times."""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import JWKRegistry, KeySet
from joserfc.jws import JWSRegistry

# Only signatures by a private key. A secret as key (HS256) would have to be shared, and its verification with a public
# key as the secret is the classic forgery; `none` has no signature.
ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519",
)  # fmt: skip
KEY_TYPES = ("RSA", "EC", "OKP")
LEEWAY_SECONDS = 60  # between the clocks of the provider and of this node


class InvalidToken(Exception):
    """A token is not valid. The message is for the log and never part of a response."""


class UnknownKey(InvalidToken):
    """The key that signed a token is not among the known ones; the provider may have a new one."""


class _Registry(JWSRegistry):
    """Accept longer headers than usual, and parameters that are not known (RFC 7515, section 4), unless critical."""

    max_header_length = 4096


def import_keys(document: Mapping[str, Any]) -> KeySet:
    """Return the public keys of a JWK set, without those that cannot verify a signature."""
    entries = document.get("keys")
    keys = []
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and entry.get("kty") in KEY_TYPES and entry.get("use", "sig") == "sig":
            try:
                keys.append(JWKRegistry.import_key(entry))
            except (JoseError, binascii.Error, LookupError, TypeError, ValueError):
                continue  # one that this version cannot read must not make the others unusable
    return KeySet(keys)


def verify_token(token: str, keys: KeySet, *, issuer: str, audience: str, now: datetime) -> dict[str, Any]:
    """Return the claims of a token of this issuer for this audience. Raises InvalidToken, UnknownKey."""
    registry = jwt.JWTClaimsRegistry(
        now=int(now.timestamp()), leeway=LEEWAY_SECONDS, iss={"essential": True, "value": issuer},
        aud={"essential": True, "value": audience}, exp={"essential": True}, sub={"essential": True},
    )  # fmt: skip
    try:
        decoded = jwt.decode(token, keys, registry=_Registry(algorithms=ALGORITHMS, strict_check_header=False))
        registry.validate(decoded.claims)
    except InvalidKeyIdError as error:
        raise UnknownKey(str(error)) from error
    except (JoseError, ValueError, TypeError, RecursionError) as error:  # joserfc raises more than its own errors
        raise InvalidToken(str(error)) from error
    return decoded.claims
