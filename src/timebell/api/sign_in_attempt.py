"""One sign-in of a browser at an identity provider."""

from __future__ import annotations

import hmac
import secrets
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class SignInAttempt:
    """One sign-in of a browser at the provider.

    All values are derived from a random secret that only a cookie of the browser contains. So nothing is stored, any
    node can finish the sign-in, and the URLs do not reveal what is needed to finish it.
    """

    secret: str

    @classmethod
    def begin(cls) -> SignInAttempt:
        """Return a new attempt."""
        return cls(secrets.token_urlsafe(32))

    @property
    def state(self) -> str:
        """Value that the response must repeat: it belongs to this browser."""
        return self._derive("state")

    @property
    def nonce(self) -> str:
        """Value that the ID token must repeat: it belongs to this sign-in."""
        return self._derive("nonce")

    def has_state(self, received: object) -> bool:
        """Return whether a response belongs to this attempt."""
        return _equal(received, self.state)

    def has_nonce(self, received: object) -> bool:
        """Return whether an ID token belongs to this attempt."""
        return _equal(received, self.nonce)

    @property
    def code_verifier(self) -> str:
        """Secret of PKCE, without which the code is useless."""
        return self._derive("code verifier")

    @property
    def code_challenge(self) -> str:
        """Digest of the code verifier, for the URL (method S256)."""
        return _base64url(sha256(self.code_verifier.encode()).digest())

    def _derive(self, purpose: str) -> str:
        return _base64url(hmac.digest(self.secret.encode(), purpose.encode(), "sha256"))


def _equal(received: object, expected: str) -> bool:
    return hmac.compare_digest(str(received).encode(errors="replace"), expected.encode())


def _base64url(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()
