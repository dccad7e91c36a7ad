"""Client of an OpenID Connect provider: sign-in by authorization code with PKCE, and verification of its tokens.

OpenID Connect Core, Discovery and RP-Initiated Logout 1.0, RFC 7636 (PKCE), RFC 9207 (issuer in the response).
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote_plus, urlencode, urlsplit

from timebell import http_client
from timebell.api.provider_cache import CachedDocument, ProviderUnavailable
from timebell.api.sign_in_attempt import SignInAttempt
from timebell.client.validation import check_text
from timebell.clock import Clock
from timebell.errors import InvalidInput, Refused, TimebellError
from timebell.settings import Settings
from timebell.tenancy.identities import Identity, RoleMap, claim_values

CALLBACK_PATH, SIGN_IN_PATH = "/ui/sign-in/callback", "/ui/sign-in"
DISCOVERY_PATH = "/.well-known/openid-configuration"
ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri", "userinfo_endpoint", "end_session_endpoint")
OPTIONAL_ENDPOINTS = ENDPOINTS[3:]
NAME_CLAIMS = ("preferred_username", "email", "sub")
REQUEST_TIMEOUT_SECONDS = 4.0
MAX_RESPONSE_BYTES = 256 * 1024
LAST_INSTANT = 253_402_300_799  # 9999-12-31: a token may name a later end, but datetime cannot
MAX_ISSUER_LENGTH, MAX_NAME_LENGTH = 200, 200  # of the columns
MAX_SUBJECT_LENGTH = 255  # Core, section 2
RESERVED_NAMES = ("local", "command line", "identity provider")  # of the audit log, for actors that are not users
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class SignInFailed(TimebellError):
    """A token or a sign-in is not valid. `reason` is for the log and never part of a response."""

    code = "SIGN_IN_FAILED"

    def __init__(self, reason: str) -> None:
        super().__init__(
            "The identity provider did not confirm this sign-in.",
            fix="Sign in again; if that does not help, an operator finds the reason in the log.",
        )
        self.reason = reason


class NoRole(Refused):
    """The identity is known, but nothing about it maps to a role."""

    code = "NO_ROLE"

    def __init__(self, name: str, issuer: str, subject: str, role_claim: str, values: list[str]) -> None:
        found = f"it contains {', '.join(values)!r:.200}" if values else "it is missing"
        super().__init__(
            f"{name} has no role here: no entry of TIMEBELL_OIDC_ROLE_MAP matches the claim {role_claim} ({found}).",
            fix="Ask an admin to add you to a group with a role, then sign in again.",
        )
        self.issuer, self.subject = issuer, subject


class IdentityProvider:
    """The provider at TIMEBELL_OIDC_ISSUER.

    Its requests do not pass the address guard of webhooks: the issuer is a setting of the operator, often an internal
    host, and the other addresses come from its own discovery document. Neither users nor tenants choose any of them.
    Redirects are not followed; responses are bounded and never shown.

    Raises InvalidInput (INVALID_SETTING), Refused (EXTRA_MISSING).
    """

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self.issuer, self._client_id = settings.oidc_issuer or "", settings.oidc_client_id or ""
        self._role_map = RoleMap(settings.oidc_role_map or "")
        _check_settings(settings)
        try:
            from timebell.api import web_tokens
        except ModuleNotFoundError as missing:
            raise Refused(
                f"TIMEBELL_OIDC_ISSUER needs the package {missing.name}, which is not installed.",
                code="EXTRA_MISSING", fix='Run: pip install "timebell[oidc]".',
            ) from missing  # fmt: skip
        self._tokens = web_tokens
        self._configuration = CachedDocument(clock, self.fetch_configuration)
        self._keys = CachedDocument(clock, self.fetch_keys)

    @classmethod
    def create(cls, settings: Settings, clock: Clock) -> IdentityProvider | None:
        """Return the configured provider; None if there is none."""
        return None if settings.oidc_issuer is None else cls(settings, clock)

    @property
    def name(self) -> str:
        """Host of the issuer, for people."""
        return urlsplit(self.issuer).hostname or self.issuer

    @property
    def redirect_uri(self) -> str:
        """URL to which the provider sends the browser after a sign-in; it is registered there."""
        return self._settings.url.rstrip("/") + CALLBACK_PATH

    async def authorization_url(self, attempt: SignInAttempt) -> str:
        """Return the URL at which the browser signs in. Raises ProviderUnavailable."""
        return _with_query(
            (await self._configuration.get())["authorization_endpoint"], response_type="code",
            client_id=self._client_id, redirect_uri=self.redirect_uri, scope=self._settings.oidc_scopes,
            state=attempt.state, nonce=attempt.nonce, code_challenge=attempt.code_challenge,
            code_challenge_method="S256",
        )  # fmt: skip

    async def sign_out_url(self) -> str | None:
        """Return the URL that ends the session at the provider; None if it has none or does not answer."""
        try:
            endpoint = (await self._configuration.get()).get("end_session_endpoint")
        except ProviderUnavailable:
            return None
        own_url = self._settings.url.rstrip("/") + SIGN_IN_PATH
        # Without `id_token_hint`: storing the ID token would make a stolen database contain valid credentials.
        return endpoint and _with_query(endpoint, client_id=self._client_id, post_logout_redirect_uri=own_url)

    async def finish_sign_in(self, attempt: SignInAttempt, parameters: Mapping[str, str]) -> Identity:
        """Return the identity that signed in, given the query with which the provider sent the browser back.

        The caller has checked the state of the query. Raises SignInFailed, ProviderUnavailable, NoRole.
        """
        configuration = await self._configuration.get()
        issuer = parameters.get("iss")
        # RFC 9207: the response of another provider must not be taken for one of this provider.
        if issuer != self.issuer and (
            issuer is not None or configuration.get("authorization_response_iss_parameter_supported")
        ):
            raise SignInFailed("the response is from another issuer")
        if "code" not in parameters:
            raise SignInFailed(f"the provider answered {parameters.get('error', 'without a code')!r:.60}")
        tokens = await self._redeem_code(configuration, parameters["code"], attempt)
        claims = await self._verify(str(tokens.get("id_token")), self._client_id)
        if not attempt.has_nonce(claims.get("nonce")):
            raise SignInFailed("the nonce belongs to another sign-in")
        if isinstance(claims["aud"], list) and len(claims["aud"]) > 1 and claims.get("azp") != self._client_id:
            raise SignInFailed("the ID token was issued to another client")
        if not claim_values(claims, self._settings.oidc_role_claim):
            claims = await self._read_user_info(configuration, tokens, claims["sub"]) | claims
        return self._identify(claims)

    async def verify_bearer(self, token: str) -> Identity:
        """Return the identity that a token proves. Raises SignInFailed, ProviderUnavailable, NoRole."""
        return self._identify(await self._verify(token, self._settings.oidc_audience or self._client_id))

    async def fetch_configuration(self) -> dict[str, Any]:
        """Fetch the discovery document. Raises ProviderUnavailable."""
        document = await self._request("GET", self.issuer.rstrip("/") + DISCOVERY_PATH)
        if document.get("issuer") != self.issuer:
            raise ProviderUnavailable(f"its issuer is {document.get('issuer')!r:.200}, not {self.issuer!r}")
        for name in ENDPOINTS:
            url = document.get(name)
            if not (url is None and name in OPTIONAL_ENDPOINTS) and not is_safe_url(url):
                raise ProviderUnavailable(f"its {name} is {url!r:.200}, which is not an https URL")
        return document

    async def fetch_keys(self) -> Any:
        """Fetch the keys that verify signatures. Raises ProviderUnavailable."""
        configuration = await self._configuration.get()
        return self._tokens.import_keys(await self._request("GET", configuration["jwks_uri"]))

    async def _redeem_code(
        self, configuration: Mapping[str, Any], code: str, attempt: SignInAttempt
    ) -> dict[str, Any]:  # fmt: skip
        form = {
            "grant_type": "authorization_code", "code": code, "redirect_uri": self.redirect_uri,
            "code_verifier": attempt.code_verifier,
        }  # fmt: skip
        headers = {"content-type": "application/x-www-form-urlencoded"}
        secret = self._settings.oidc_client_secret
        methods = configuration.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        if secret is not None and "client_secret_basic" in methods:
            credentials = f"{quote_plus(self._client_id)}:{quote_plus(secret)}"  # RFC 6749, section 2.3.1
            headers["authorization"] = "Basic " + b64encode(credentials.encode()).decode()
        else:
            form |= {"client_id": self._client_id} | ({} if secret is None else {"client_secret": secret})
        return await self._request("POST", configuration["token_endpoint"], headers, urlencode(form).encode())

    async def _read_user_info(
        self, configuration: Mapping[str, Any], tokens: Mapping[str, Any], subject: str
    ) -> dict[str, Any]:
        """Return the claims that the provider does not put into the ID token."""
        endpoint, access_token = configuration.get("userinfo_endpoint"), tokens.get("access_token")
        if endpoint is None or not isinstance(access_token, str):
            return {}
        claims = await self._request("GET", endpoint, {"authorization": f"Bearer {access_token}"})
        if claims.get("sub") != subject:  # Core, section 5.3.2
            raise SignInFailed("the user info belongs to another subject")
        return claims

    async def _verify(self, token: str, audience: str) -> dict[str, Any]:
        """Return the claims of a valid token; fetch the provider's keys again if the token has an unknown key."""
        for is_second in (False, True):
            keys = await self._keys.get(newer=is_second)
            try:
                return self._tokens.verify_token(
                    token, keys, issuer=self.issuer, audience=audience, now=self._clock.now()
                )
            except self._tokens.UnknownKey as error:
                reason = str(error)
            except self._tokens.InvalidToken as error:
                raise SignInFailed(str(error)) from error
        raise SignInFailed(reason)

    def _identify(self, claims: Mapping[str, Any]) -> Identity:
        subject = claims["sub"]
        if not _is_text(subject, MAX_SUBJECT_LENGTH):
            raise SignInFailed("the subject is not text of at most 255 characters")
        name = next((claims[claim] for claim in NAME_CLAIMS if _is_name(claims.get(claim))), subject[:MAX_NAME_LENGTH])
        values = claim_values(claims, self._settings.oidc_role_claim)
        grant = self._role_map.find_grant(values)
        if grant is None:
            raise NoRole(name, self.issuer, subject, self._settings.oidc_role_claim, values)
        return Identity(
            issuer=self.issuer, subject=subject, name=name, role=grant.role, tenant_id=grant.tenant_id,
            expires_at=datetime.fromtimestamp(min(claims["exp"], LAST_INSTANT), UTC),
        )  # fmt: skip

    async def _request(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> dict[str, Any]:
        """Send a request and return the JSON object of its response. Raises ProviderUnavailable, SignInFailed."""
        try:
            response = await http_client.send_request(
                method, url, {"accept": "application/json", **(headers or {})}, body, timeout=REQUEST_TIMEOUT_SECONDS,
                max_bytes=MAX_RESPONSE_BYTES,
            )  # fmt: skip
        except http_client.HttpClientError as error:
            raise ProviderUnavailable(f"{url:.200} does not answer: {error or type(error).__name__}") from error
        try:
            document = json.loads(response.body) if response.is_complete else None
        except (ValueError, RecursionError):
            document = None
        if isinstance(document, dict) and 400 <= response.status < 500 and body:
            raise SignInFailed(f"the provider refused the code: {document.get('error')!r:.100}")
        if response.status != 200 or not isinstance(document, dict):
            kind = "JSON" if isinstance(document, dict) else "no JSON object"
            raise ProviderUnavailable(f"{url:.200} answered with status {response.status} and {kind}")
        return document


def _check_settings(settings: Settings) -> None:
    """Check the settings of the provider. Raises InvalidInput (INVALID_SETTING)."""
    issuer = settings.oidc_issuer or ""
    if not is_safe_url(issuer) or len(issuer) > MAX_ISSUER_LENGTH or set(issuer) & set("?#"):
        raise InvalidInput(
            f"TIMEBELL_OIDC_ISSUER is {issuer!r:.200}.", code="INVALID_SETTING",
            fix="Use the https URL that the provider calls its issuer; http only on this machine.",
        )  # fmt: skip
    for name, value in (("CLIENT_ID", settings.oidc_client_id), ("ROLE_MAP", settings.oidc_role_map)):
        if value is None:
            raise InvalidInput(
                f"TIMEBELL_OIDC_ISSUER is set, but TIMEBELL_OIDC_{name} is not.", code="INVALID_SETTING",
                fix="Set both; docs/guides/security.md has an example.",
            )  # fmt: skip
    if "openid" not in settings.oidc_scopes.split():
        raise InvalidInput(
            f"TIMEBELL_OIDC_SCOPES is {settings.oidc_scopes!r:.200}, without openid.", code="INVALID_SETTING",
            fix='Use at least "openid".',
        )  # fmt: skip


def is_safe_url(url: object) -> bool:
    """Return whether a URL is https, or http on this machine: codes, secrets and keys must not be readable."""
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
    except ValueError:
        return False
    return parts is not None and bool(parts.hostname) and (
        parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
    )  # fmt: skip


def _is_name(value: object) -> bool:
    """Return whether the audit log may show a text as a name: it has no control or direction characters."""
    return _is_text(value, MAX_NAME_LENGTH) and str(value).isprintable() and value not in RESERVED_NAMES


def _is_text(value: object, max_length: int) -> bool:
    try:
        check_text(value, "name", max_length)
    except InvalidInput:
        return False
    return True


def _with_query(url: str, **parameters: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{urlencode(parameters)}"
