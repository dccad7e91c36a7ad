"""TLS contexts of targets with authorities or a client certificate of their own."""

from __future__ import annotations

import os
import secrets
import ssl
import tempfile
from functools import lru_cache

from timebell import http_client
from timebell.errors import InvalidInput, Refused

MAX_CACHED_CONTEXTS = 256


@lru_cache(maxsize=MAX_CACHED_CONTEXTS)
def create_context(authorities: str | None, certificate: str | None, key: str | None) -> ssl.SSLContext:
    """Return a context that trusts `authorities` besides those of the system, and presents `certificate` with `key`.

    All are PEM. Cached, because loading the system's authorities is slow. Raises InvalidInput (INVALID_CERTIFICATE),
    Refused (EXTRA_MISSING).
    """
    context = http_client.create_tls_context()
    try:
        if authorities is not None:
            context.load_verify_locations(cadata=authorities)
    except (ssl.SSLError, ValueError) as error:
        raise _invalid("tls.ca contains no certificate in PEM form") from error
    if certificate is not None and key is not None:
        _load_certificate(context, certificate, key)
    return context


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Load a client certificate. OpenSSL reads only files, so the key is written encrypted, with a random password."""
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError as error:
        raise Refused(
            "Client certificates need the package cryptography, which is not installed.",
            code="EXTRA_MISSING",
            fix='Run: pip install "timebell[secrets]".',
        ) from error
    password = secrets.token_bytes(32).hex().encode()
    try:
        encrypted = serialization.load_pem_private_key(key.encode(), None).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(password),
        )
    except (ValueError, TypeError) as error:
        raise _invalid("tls.key is not a private key in PEM form without a password") from error
    with tempfile.TemporaryDirectory(prefix="timebell-tls-") as folder:
        path = os.path.join(folder, "chain.pem")
        with open(path, "wb") as file:
            file.write(encrypted + b"\n" + certificate.encode())
        try:
            context.load_cert_chain(path, password=password)
        except ssl.SSLError as error:
            raise _invalid("tls.certificate is not a certificate in PEM form, or belongs to another key") from error


def _invalid(problem: str) -> InvalidInput:
    return InvalidInput(f"{problem}.", code="INVALID_CERTIFICATE", fix="Use PEM: text that begins with -----BEGIN.")
