"""Authentication by API key or token of an identity provider; request throttling per tenant.

In `dev`, requests from loopback need neither.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256

from fastapi import Request

from timebell.alarm import Alarm
from timebell.api.admission import Capacity
from timebell.api.authentication_failures import AuthenticationFailures
from timebell.api.client_address import client_network
from timebell.api.identity_provider import IdentityProvider, SignInFailed
from timebell.api.refusals import UNKNOWN_ACTOR, RefusalLog
from timebell.api.shared_reads import SharedReads
from timebell.app import Timebell
from timebell.client.validation import check_text
from timebell.errors import InvalidInput, Refused, StoreError, TimebellError
from timebell.store.tenancy import api_keys as key_rows
from timebell.store.tenancy import identities, usage
from timebell.tenancy import keys
from timebell.tenancy.identities import Identity
from timebell.tenancy.keys import Key
from timebell.tenancy.limits import LimitReached, Limits
from timebell.tenancy.roles import Role
from timebell.tenancy.secrets import split_secret_keys

log = logging.getLogger("timebell.api")

LOOPBACK = ("127.0.0.1", "::1", "localhost")
CACHE_SECONDS = 2.0  # for keys and limits; a revocation must take effect within 5 s
MAX_CACHE_ENTRIES = 10_000
DEFAULT_REQUESTS_PER_SECOND = 2000
TENANT_HEADER = "Timebell-Tenant"


class Unauthorized(TimebellError):
    """The request has no valid key. The error does not reveal what is wrong with the key."""

    code = "UNAUTHORIZED"


@dataclass(frozen=True, slots=True)
class Caller:
    """Authenticated caller and its tenant. `key` is None if it did not authenticate with an API key.

    `identity` is set if it authenticated with a token of the identity provider.
    """

    actor: str
    tenant_id: str
    role: Role
    address: str
    key: Key | None = None
    specifies_tenant: bool = False
    """True if the request specifies a tenant."""
    identity: Identity | None = None
    kind: str = "key"
    """What the actor is, for the audit log: `key`, `user`, `source` (a signed webhook) or `local`."""

    @property
    def is_platform(self) -> bool:
        """True if the caller may access other tenants."""
        return self.role is Role.PLATFORM


class TokenBucket:
    """Token bucket with a capacity of one second's tokens. `now` is monotonic time in seconds."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate, self.tokens, self.updated_at = rate, rate, now

    def take(self, rate: float, now: float) -> bool:
        """Take one token; return False if the bucket is empty. `rate` is tokens per second."""
        self.tokens = min(rate, self.tokens + (now - self.updated_at) * rate)
        self.rate, self.updated_at = rate, now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


class Authenticator:
    """Authenticate and throttle requests. With `allow_local`, requests from this machine need no key."""

    def __init__(self, app: Timebell, *, allow_local: bool) -> None:
        self.app = app
        self.capacity = Capacity()
        self.failures = AuthenticationFailures(app)
        self.identity_provider = IdentityProvider.create(app.settings, app.clock)
        self.refusals = RefusalLog(app)
        self.allow_local = allow_local
        self._keys_by_digest: dict[str, tuple[Key, float]] = {}
        self._identities_by_digest: dict[bytes, tuple[Identity, float]] = {}
        self._keys_by_id: dict[str, tuple[Key, float]] = {}
        self._key_reads: SharedReads[Key | None] = SharedReads()
        self._limits_cache: dict[str, tuple[Limits, float]] = {}
        self._limit_reads: SharedReads[Limits] = SharedReads()
        self._buckets: dict[str, TokenBucket] = {}
        self._unrecorded: dict[str, int] = {}
        self._open_streams: Counter[str] = Counter()
        self._stop_alarms: set[Alarm] = set()
        self.stopping = False

    async def authenticate(self, request: Request) -> Caller:
        """Return the caller. Raises Unauthorized, Refused, InvalidInput."""
        if (caller := getattr(request.state, "caller", None)) is not None:
            return caller  # type: ignore[no-any-return]  # set by a dashboard page that has authenticated the user
        address = request.client.host if request.client else ""
        if f"tb_{keys.ENVIRONMENT}_".encode() in request.scope["query_string"]:
            raise InvalidInput(
                "API keys must not be sent in the URL, because URLs are logged.", code="KEY_IN_URL",
                fix="Send Authorization: Bearer <key>, and revoke this key.",
            )  # fmt: skip
        authorization = request.headers.get("authorization", "")
        if not authorization and self.allow_local:
            _check_local(request)
            tenant_id, specifies_tenant = _select_tenant(None, request)
            return Caller("local", tenant_id, Role.PLATFORM, address, specifies_tenant=specifies_tenant, kind="local")
        scheme, _, text = authorization.partition(" ")
        credential = text.strip() if scheme.lower() == "bearer" else ""
        if self.identity_provider is not None and credential.count(".") == 2:
            identity = await self._verify_token(self.identity_provider, credential, address)
            tenant_id, specifies_tenant = _select_tenant(identity.tenant_id, request)
            return Caller(
                identity.name, tenant_id, identity.role, address, None, specifies_tenant, identity, kind="user"
            )  # fmt: skip
        key = await self.verify_key(credential, address)
        tenant_id, specifies_tenant = _select_tenant(key.tenant_id, request)
        return Caller(key.name, tenant_id, key.role, address, key, specifies_tenant)

    async def _verify_token(self, provider: IdentityProvider, token: str, address: str) -> Identity:
        """Return the identity of a token of the provider. Raises Unauthorized, Refused, ProviderUnavailable."""
        at, digest = self.app.clock.monotonic(), sha256(token.encode(errors="replace")).digest()
        cached = self._identities_by_digest.get(digest)
        if cached is not None and at - cached[1] <= CACHE_SECONDS:
            return cached[0]
        try:
            identity = await provider.verify_bearer(token)
            user = await self.app.store.run(identities.check_identity, identity)
        except SignInFailed as error:
            log.debug("token refused reason=%s", error.reason)
            raise self.reject("wrong_token", address) from error
        except Refused:
            self.failures.record("refused_identity", address)
            raise
        if user is not None:  # the name under which the audit log knows this identity
            identity = replace(identity, name=user.name)
        if len(self._identities_by_digest) > MAX_CACHE_ENTRIES:
            self._identities_by_digest.clear()
        self._identities_by_digest[digest] = (identity, at)
        return identity

    async def verify_key(self, key_text: str, address: str) -> Key:
        """Return the key with this text if it is valid for this IP address. Raises Unauthorized.

        Wrong keys are not throttled: a key has 192 random bits, and wrong keys of other clients must not affect a valid
        one.
        """
        id_ = keys.parse_key_id(key_text)
        if id_ is None:  # found without the database; anyone can compute the checksum, so this reveals nothing
            raise await self._reject_key(key_text, address)
        now, at = self.app.clock.now(), self.app.clock.monotonic()
        digests = keys.digests(self.app.settings.secret_key, key_text) or keys.digests("-", key_text)
        cached = self._keys_by_digest.get(digests[0])
        key: Key | None
        if cached is not None and at - cached[1] <= CACHE_SECONDS:
            key = cached[0]
        else:
            read = self._read_new_key if cached is None else self._read_key
            key = await self._key_reads.get(digests[0], lambda: read(id_, digests, address))
        if key is None:
            raise await self._reject_key(key_text, address)
        if not key.is_usable(now, address):
            await self._record_rejected_key("UNUSABLE_KEY", key, address)
            raise self.reject("unusable_key", address)
        return key

    async def _read_new_key(self, id_: str, digests: Sequence[str], address: str) -> Key | None:
        # Few per client at a time: keys that one client invents must not occupy the connections to the database.
        async with self.capacity.lookups.hold(client_network(address)):
            return await self._read_key(id_, digests, address)

    async def _read_key(self, id_: str, digests: Sequence[str], address: str) -> Key | None:
        """Read a key from the store, cache it and note its use; return None if its id or secret is wrong.

        An unknown id costs the same work as a wrong secret, so response times do not reveal valid ids.
        """
        now, at = self.app.clock.now(), self.app.clock.monotonic()
        found = await self.app.store.run(key_rows.find_key, id_)
        stored = found[1] if found else "0" * 64
        matches = [candidate for candidate in digests if keys.digests_match(stored, candidate)]
        if found is None or not matches or not split_secret_keys(self.app.settings.secret_key):
            self._keys_by_digest.pop(digests[0], None)
            return None
        key = found[0]
        if len(self._keys_by_digest) > MAX_CACHE_ENTRIES:
            self._keys_by_digest.clear()
        self._keys_by_digest[digests[0]] = (key, at)
        if key.is_usable(now, address):
            await self.app.store.run(key_rows.record_use, id_, now)
            if stored != digests[0]:  # created with an older secret key: rehash with the newest
                await self.app.store.run(key_rows.replace_digest, id_, stored, digests[0])
        return key

    async def _reject_key(self, key_text: str, address: str) -> Unauthorized:
        if key_text:
            await self._record_rejected_key("WRONG_KEY", None, address)
        return self.reject("wrong_key" if key_text else "missing_key", address)

    async def _record_rejected_key(self, code: str, key: Key | None, address: str) -> None:
        await self.refusals.record(
            tenant_id=(key.tenant_id if key else None) or "default", actor=key.name if key else UNKNOWN_ACTOR,
            actor_kind="key", network=client_network(address), address=address, action="key.use",
            subject=key.id if key else None, key_id=key.id if key else None, code=code, authenticated=False,
        )  # fmt: skip

    def reject(self, reason: str, address: str) -> Unauthorized:
        """Record a failed authentication and return the error to raise, which is the same for every reason."""
        self.failures.record(reason, address)
        return Unauthorized(
            "This requires an API key.", fix="Send Authorization: Bearer <key>; timebell key create creates one."
        )

    def count_ignored_header(self) -> None:
        """Count a header that names the client's address, from a peer that is not a trusted proxy."""
        if self.app.service is not None:
            self.app.service.node.counters.forwarded_headers_ignored += 1

    async def is_valid(self, caller: Caller) -> bool:
        """Return whether the credential of a streaming response is still valid; a key at most CACHE_SECONDS old.

        While the database does not respond, a key, and the user of a token, count as valid.
        """
        if caller.identity is not None:
            return await self._is_identity_valid(caller.identity)
        if caller.key is None:
            return True
        id_, at = caller.key.id, self.app.clock.monotonic()
        cached = self._keys_by_id.get(id_)
        if cached is None or at - cached[1] > CACHE_SECONDS:
            if len(self._keys_by_id) > MAX_CACHE_ENTRIES:
                self._keys_by_id.clear()
            try:
                found = await self.app.store.run(key_rows.find_key, id_)
            except StoreError:
                return True
            if found is None:
                return False
            cached = self._keys_by_id[id_] = (found[0], at)
        return cached[0].is_usable(self.app.clock.now(), caller.address)

    async def _is_identity_valid(self, identity: Identity) -> bool:
        if self.app.clock.now() >= identity.expires_at:
            return False
        try:
            await self.app.store.run(identities.check_identity, identity)
        except Refused:
            return False
        except StoreError:
            return True
        return True

    @contextmanager
    def count_stream(self, tenant_id: str, max_streams: int) -> Iterator[None]:
        """Count an open stream of a tenant while the block runs. Raises LimitReached."""
        if self._open_streams[tenant_id] >= max_streams:
            raise LimitReached(
                f"The tenant {tenant_id} has {max_streams} open streams on this node.", retry_after=5.0,
                fix="Close some streams.",
                limit={"name": "streams", "max": max_streams},
            )  # fmt: skip
        self._open_streams[tenant_id] += 1
        try:
            yield
        finally:
            self._open_streams[tenant_id] -= 1
            if not self._open_streams[tenant_id]:
                del self._open_streams[tenant_id]

    @contextmanager
    def wake_on_stop(self, alarm: Alarm) -> Iterator[None]:
        """Wake this alarm when the server stops, while the block runs."""
        self._stop_alarms.add(alarm)
        try:
            yield
        finally:
            self._stop_alarms.discard(alarm)

    def stop(self) -> None:
        """End all open streams."""
        self.stopping = True
        for alarm in self._stop_alarms:
            alarm.wake()

    async def throttle(self, caller: Caller) -> Mapping[str, str]:
        """Count a request of a tenant and return the RateLimit headers. Raises LimitReached."""
        self._unrecorded[caller.tenant_id] = self._unrecorded.get(caller.tenant_id, 0) + 1
        limits = await self.tenant_limits(caller.tenant_id)
        # Read the clock after the await: a request that waited longer would otherwise pass an older time to the bucket
        # and remove tokens added since.
        at = self.app.clock.monotonic()
        rate = limits.requests_per_second or DEFAULT_REQUESTS_PER_SECOND
        if len(self._buckets) > MAX_CACHE_ENTRIES:
            self._buckets.clear()
        bucket = self._buckets.setdefault(caller.tenant_id, TokenBucket(rate, at))
        if not bucket.take(rate, at):
            raise LimitReached(
                f"The tenant {caller.tenant_id} is limited to {rate} requests per second.",
                retry_after=1.0,
                fix="Send requests more slowly.",
                limit={"name": "requestsPerSecond", "max": rate},
            )
        return {"RateLimit-Policy": f'"default";q={rate};w=1', "RateLimit": f'"default";r={int(bucket.tokens)};t=1'}

    async def tenant_limits(self, tenant_id: str) -> Limits:
        """Return the limits of a tenant, at most CACHE_SECONDS old. Also persists its request count."""
        at = self.app.clock.monotonic()
        cached = self._limits_cache.get(tenant_id)
        if cached is not None and at - cached[1] <= CACHE_SECONDS:
            return cached[0]
        return await self._limit_reads.get(tenant_id, lambda: self._read_limits(tenant_id))

    async def _read_limits(self, tenant_id: str) -> Limits:
        at, requests = self.app.clock.monotonic(), self._unrecorded.pop(tenant_id, 0)
        limits: Limits = await self.app.store.run(
            usage.count_requests_and_get_limits, tenant_id, self.app.clock.now(), requests,
            self.app.settings.node_name,
        )  # fmt: skip
        if len(self._limits_cache) > MAX_CACHE_ENTRIES:
            self._limits_cache.clear()
        self._limits_cache[tenant_id] = (limits, at)
        return limits

    def unrecorded_requests(self, tenant_id: str) -> int:
        """Return the number of requests of a tenant on this node that are not persisted yet."""
        return self._unrecorded.get(tenant_id, 0)


def _select_tenant(own_tenant_id: str | None, request: Request) -> tuple[str, bool]:
    """Return the tenant of a caller, and whether the request specifies one, which only the platform may choose.

    Raises Refused (TENANT_FORBIDDEN), InvalidInput.
    """
    requested = request.headers.get(TENANT_HEADER) or request.query_params.get("tenant")
    if requested and own_tenant_id is not None and requested != own_tenant_id:
        raise Refused(
            f"The key or token does not belong to the tenant {requested!r:.60}.", code="TENANT_FORBIDDEN",
            fix="Omit the tenant: the key or token determines it.",
        )  # fmt: skip
    return own_tenant_id or check_text(requested or "default", "tenant_id"), bool(requested)


def _check_local(request: Request) -> None:
    """Reject requests by other hosts or by pages of other sites (CSRF, DNS rebinding). Raises Refused (NOT_LOCAL)."""
    site = request.headers.get("sec-fetch-site", "same-origin")
    if request.url.hostname not in LOOPBACK or site not in ("same-origin", "none"):
        raise Refused(
            "Without a key, only requests from this machine are accepted.", code="NOT_LOCAL",
            fix="Use http://127.0.0.1, or send a key.",
        )  # fmt: skip
