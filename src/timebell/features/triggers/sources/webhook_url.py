"""URLs of inbound webhooks: `/hooks/{sourceId}`, with a token for senders that have no API key.

The token is an HMAC-SHA-256 of the source id under the installation's secret key, which any node can verify.
"""

from __future__ import annotations

import hmac
from urllib.parse import quote

from timebell.tenancy.keys import digests

HOOKS_PATH = "/api/v1/hooks"
TOKEN_PARAMETER = "token"  # noqa: S105 - the name of a query parameter


def token_query(secret_key: str | None, source_id: str) -> str:
    """Return the query string with the token of a webhook URL; empty without a secret key."""
    return "".join(f"?{TOKEN_PARAMETER}={quote(token)}" for token in _url_tokens(secret_key, source_id)[:1])


def is_url_token(token: str, secret_key: str | None, source_id: str) -> bool:
    """Return whether this is the token of a source."""
    presented = token.encode(errors="replace")
    return any(hmac.compare_digest(valid.encode(), presented) for valid in _url_tokens(secret_key, source_id))


def _url_tokens(secret_key: str | None, source_id: str) -> list[str]:
    return [digest[:40] for digest in digests(secret_key, f"hook {source_id}")]
