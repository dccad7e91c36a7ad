"""Checks of `timebell doctor` on the identity provider: settings, reachability, keys, clock and redirect URI."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC
from email.utils import parsedate_to_datetime

from timebell import http_client
from timebell.api.identity_provider import (
    DISCOVERY_PATH,
    MAX_RESPONSE_BYTES,
    REQUEST_TIMEOUT_SECONDS,
    IdentityProvider,
    is_safe_url,
)
from timebell.api.provider_cache import ProviderUnavailable
from timebell.cli.doctor.findings import Check, fail, warn
from timebell.clock import SystemClock, system_now
from timebell.errors import InvalidInput, Refused
from timebell.settings import Settings

CLOCK_WARNING_SECONDS = 30  # tokens are accepted up to a minute before and after their time


async def check_identity_provider(settings: Settings) -> AsyncIterator[Check]:
    """Yield the checks of single sign-on, if it is configured."""
    try:
        provider = IdentityProvider.create(settings, SystemClock())
    except InvalidInput as error:
        yield fail("sign-on", "SIGN_ON_MISCONFIGURED", error.message, error.fix)
        return
    except Refused:  # a missing extra is reported with the others
        return
    if provider is None:
        return
    if not is_safe_url(provider.redirect_uri):
        yield warn("sign-on", "REDIRECT_URI_WITHOUT_TLS", f"the redirect URI is {provider.redirect_uri}",
                   "Set TIMEBELL_URL to the https address of the proxy.")  # fmt: skip
    try:
        await provider.fetch_configuration()
        keys = await provider.fetch_keys()
    except ProviderUnavailable as error:
        fix = "Check TIMEBELL_OIDC_ISSUER, the network, and the certificate (SSL_CERT_FILE)."
        yield fail("sign-on", "IDENTITY_PROVIDER_UNAVAILABLE", f"{provider.issuer}: {error.reason}", fix)
        return
    if not keys:
        detail = f"{provider.issuer} has no key that verifies a signature"
        yield fail("sign-on", "IDENTITY_PROVIDER_UNAVAILABLE", detail, "Configure RS256 or ES256 at the provider.")
        return
    offset = await _clock_offset(provider.issuer)
    if offset is not None and abs(offset) > CLOCK_WARNING_SECONDS:
        detail = f"the clock of {provider.issuer} differs by {offset:+.0f} s"
        fix = "Check NTP on this machine and at the provider."
        yield warn("sign-on", "IDENTITY_PROVIDER_CLOCK_DIFFERS", detail, fix)
    yield Check("ok", "sign-on", f"{provider.issuer} answers; register {provider.redirect_uri} there as redirect URI")


async def _clock_offset(issuer: str) -> float | None:
    """Return by how many seconds the provider's clock is ahead; None if it does not send the time."""
    url = issuer.rstrip("/") + DISCOVERY_PATH
    try:
        response = await http_client.send_request(
            "GET", url, {}, timeout=REQUEST_TIMEOUT_SECONDS, max_bytes=MAX_RESPONSE_BYTES
        )
        sent_at = parsedate_to_datetime(response.header(b"date"))
    except (http_client.HttpClientError, ValueError):
        return None
    return (sent_at.replace(tzinfo=sent_at.tzinfo or UTC) - system_now()).total_seconds()
