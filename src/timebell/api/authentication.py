"""Who is let in: the key of a request, or on loopback in `dev` everyone on this machine."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import Request

from timebell.alarm import Alarm
from timebell.app import Timebell
from timebell.client.validation import text as name_text
from timebell.errors import InvalidInput, Refused, StoreError, TimebellError
from timebell.store.tenancy import api_keys as key_rows
from timebell.store.tenancy import usage
from timebell.tenancy import keys
from timebell.tenancy.keys import Key
from timebell.tenancy.limits import LimitReached, Limits
from timebell.tenancy.roles import Role

LOOPBACK = ("127.0.0.1", "::1", "localhost")
REMEMBERED = 2.0  # seconds for which a key's row is not read again: well within the 5 s of a revocation
WRONG_A_MINUTE = 10
MOST_REMEMBERED = 10_000
REQUESTS_PER_SECOND = 2000
CHANGES_AT_ONCE = 8  # fewer than the store has connections: a flood of reports must leave some to the engine
TENANT_HEADER = "Timebell-Tenant"


class Unauthorized(TimebellError):
    """No key, or none that opens anything. The answer is the same whatever is wrong with it."""

    code = "UNAUTHORIZED"


class TooManyWrongKeys(TimebellError):
    """This address has guessed too often."""

    code = "TOO_MANY_WRONG_KEYS"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and in which tenant. `key` is None on loopback in `dev`."""

    actor: str
    tenant_id: str
    role: Role
    address: str
    key: Key | None = None
    named: bool = False
    """Whether the request names a tenant."""

    @property
    def everywhere(self) -> bool:
        """Whether other tenants may be named."""
        return self.role is Role.PLATFORM


class Bucket:
    """Tokens that come back at a steady rate."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate, self.left, self.at = rate, rate, now

    def take(self, rate: float, now: float) -> bool:
        """One token, if there is one."""
        self.left = min(rate, self.left + (now - self.at) * rate)
        self.rate, self.at = rate, now
        if self.left < 1:
            return False
        self.left -= 1
        return True


class Door:
    """Lets requests in. With `open_here`, those from this machine's own browser and shell need no key."""

    def __init__(self, app: Timebell, *, open_here: bool) -> None:
        self.app = app
        self.changing = asyncio.Semaphore(CHANGES_AT_ONCE)
        self.open_here = open_here
        self._known: dict[str, tuple[Key, float]] = {}
        self._seen: dict[str, tuple[Key, float]] = {}
        self._wrong: dict[str, deque[float]] = {}
        self._limits: dict[str, tuple[Limits, float]] = {}
        self._buckets: dict[str, Bucket] = {}
        self._requests: dict[str, int] = {}
        self._streams: Counter[str] = Counter()
        self._alarms: set[Alarm] = set()
        self.stopping = False

    async def admit(self, request: Request) -> Caller:
        """The caller. Raises Unauthorized, TooManyWrongKeys, Refused, InvalidInput."""
        if (known := getattr(request.state, "caller", None)) is not None:
            return known  # type: ignore[no-any-return]  # a page's, which let the caller in and asks in its name
        address = request.client.host if request.client else ""
        if f"tb_{keys.ENVIRONMENT}_" in request.url.query:
            raise InvalidInput(
                "A key does not belong into a URL, which is logged everywhere.", code="KEY_IN_URL",
                fix="Send it as Authorization: Bearer <key>, and revoke this one.",
            )  # fmt: skip
        given = request.headers.get("authorization", "")
        if not given and self.open_here:
            _check_local(request)
            return self._acting("local", None, Role.PLATFORM, address, request)
        scheme, _, text = given.partition(" ")
        key = await self.check(text.strip() if scheme.lower() == "bearer" else "", address)
        return self._acting(key.name, key, key.role, address, request)

    def _acting(self, actor: str, key: Key | None, role: Role, address: str, request: Request) -> Caller:
        own = key.tenant_id if key is not None else None
        named = request.headers.get(TENANT_HEADER) or request.query_params.get("tenant")
        if named and own is not None and named != own:
            raise Refused(
                f"This key is of another tenant than {named!r:.60}.", code="TENANT_NOT_YOURS",
                fix="Leave the tenant out: the key decides.",
            )  # fmt: skip
        tenant_id = own or name_text(named or "default", "tenant_id")
        return Caller(actor, tenant_id, role, address, key, bool(named))

    async def check(self, text: str, address: str) -> Key:
        """The key with this text, from this address. Raises Unauthorized, TooManyWrongKeys."""
        now, at = self.app.clock.now(), self.app.clock.monotonic()
        if len(self._recent(address, at)) >= WRONG_A_MINUTE:
            raise TooManyWrongKeys("Too many wrong keys came from this address.", fix="Wait a minute.")
        # The same work for an unknown id and a wrong secret.
        id_ = keys.id_of(text) or ""
        secret_key = self.app.settings.secret_key
        digest, *older = keys.digests(secret_key, text) or keys.digests("-", text)
        known = self._known.get(digest)
        if known is None or at - known[1] > REMEMBERED:
            self._known.pop(digest, None)
            found = await self.app.store.run(key_rows.find, id_)
            stored = found[1] if found else "0" * 64
            right = [one for one in (digest, *older) if keys.matches(stored, one)]
            if found is None or not right or not keys.peppers(secret_key):
                self._recent(address, at).append(at)
                raise _unauthorized()
            if len(self._known) > MOST_REMEMBERED:
                self._known.clear()
            known = self._known[digest] = (found[0], at)
            if found[0].usable(now, address):
                await self.app.store.run(key_rows.used, id_, now)
                if stored != digest:  # of a secret key that is being rotated out
                    await self.app.store.run(key_rows.under, id_, stored, digest)
        if not known[0].usable(now, address):
            raise _unauthorized()
        return known[0]

    def wrong(self, address: str) -> Unauthorized:
        """Count a wrong guess from there; what to raise then. Raises TooManyWrongKeys."""
        recent = self._recent(address, at := self.app.clock.monotonic())
        if len(recent) >= WRONG_A_MINUTE:
            raise TooManyWrongKeys("Too many wrong keys came from this address.", fix="Wait a minute.")
        recent.append(at)
        return _unauthorized()

    def guess(self, address: str) -> float:
        """Count a try at a password from an address, before it is looked at: tries at once count too. Raises
        TooManyWrongKeys."""
        at = self.app.clock.monotonic()
        recent = self._recent(address, at)
        if len(recent) >= WRONG_A_MINUTE:
            raise TooManyWrongKeys("Too many wrong passwords and keys came from this address.", fix="Wait a minute.")
        recent.append(at)
        return at

    def guessed(self, address: str, at: float) -> None:
        """That try was right: it counts no longer."""
        recent = self._recent(address, self.app.clock.monotonic())
        if at in recent:
            recent.remove(at)

    async def still(self, caller: Caller) -> bool:
        """Whether the key of a long answer is good yet, as of at most 2 s ago."""
        if caller.key is None:
            return True
        id_, at = caller.key.id, self.app.clock.monotonic()
        known = self._seen.get(id_)
        if known is None or at - known[1] > REMEMBERED:
            if len(self._seen) > MOST_REMEMBERED:
                self._seen.clear()
            try:
                found = await self.app.store.run(key_rows.find, id_)
            except StoreError:
                return True
            if found is None:
                return False
            known = self._seen[id_] = (found[0], at)
        return known[0].usable(self.app.clock.now(), caller.address)

    @contextmanager
    def listening(self, tenant_id: str, most: int) -> Iterator[None]:
        """Count an answer that does not end by itself. Raises LimitReached."""
        if self._streams[tenant_id] >= most:
            raise LimitReached(
                f"The tenant {tenant_id} listens {most} times here.", retry_after=5.0, fix="Close some of them.",
                limit={"name": "streams", "most": most},
            )  # fmt: skip
        self._streams[tenant_id] += 1
        try:
            yield
        finally:
            self._streams[tenant_id] -= 1
            if not self._streams[tenant_id]:
                del self._streams[tenant_id]

    @contextmanager
    def told(self, alarm: Alarm) -> Iterator[None]:
        """Poke this alarm when the server stops."""
        self._alarms.add(alarm)
        try:
            yield
        finally:
            self._alarms.discard(alarm)

    def stop(self) -> None:
        """End the answers that do not end by themselves."""
        self.stopping = True
        for alarm in self._alarms:
            alarm.poke()

    def _recent(self, address: str, at: float) -> deque[float]:
        """When wrong keys came from there in the last minute."""
        if len(self._wrong) > MOST_REMEMBERED:
            self._wrong.clear()
        times = self._wrong.setdefault(address, deque(maxlen=WRONG_A_MINUTE))
        while times and at - times[0] > 60:
            times.popleft()
        return times

    async def pace(self, caller: Caller) -> Mapping[str, str]:
        """Count a request of a tenant; the RateLimit fields. Raises LimitReached."""
        self._requests[caller.tenant_id] = self._requests.get(caller.tenant_id, 0) + 1
        limits = await self.limits(caller.tenant_id)
        at = self.app.clock.monotonic()  # after the wait, or who waited longer would take back what has flowed in since
        rate = limits.requests_per_second or REQUESTS_PER_SECOND
        if len(self._buckets) > MOST_REMEMBERED:
            self._buckets.clear()
        bucket = self._buckets.setdefault(caller.tenant_id, Bucket(rate, at))
        taken = bucket.take(rate, at)
        if not taken:
            raise LimitReached(
                f"The tenant {caller.tenant_id} may ask {rate} times a second.",
                retry_after=1.0,
                fix="Slow down.",
                limit={"name": "requestsPerSecond", "most": rate},
            )
        return {"RateLimit-Policy": f'"default";q={rate};w=1', "RateLimit": f'"default";r={int(bucket.left)};t=1'}

    async def limits(self, tenant_id: str) -> Limits:
        """The limits of a tenant, at most 2 s old."""
        at = self.app.clock.monotonic()
        known = self._limits.get(tenant_id)
        if known is None or at - known[1] > REMEMBERED:
            if len(self._limits) > MOST_REMEMBERED:
                self._limits.clear()
            requests = self._requests.pop(tenant_id, 0)
            seen = (tenant_id, self.app.clock.now(), requests, self.app.settings.node_name)
            known = self._limits[tenant_id] = (await self.app.store.run(usage.look, *seen), at)
        return known[0]

    def unwritten(self, tenant_id: str) -> int:
        """Requests of a tenant here that are not in the store yet."""
        return self._requests.get(tenant_id, 0)


def _unauthorized() -> Unauthorized:
    return Unauthorized(
        "This needs an API key.", fix="Send Authorization: Bearer <key>; timebell key create makes one."
    )


def _check_local(request: Request) -> None:
    """No page of another site may use what is open to this machine. Raises Refused (NOT_LOCAL)."""
    site = request.headers.get("sec-fetch-site", "same-origin")
    if request.url.hostname not in LOOPBACK or site not in ("same-origin", "none"):
        raise Refused(
            "Without a key this answers to this machine alone.", code="NOT_LOCAL",
            fix="Open it at http://127.0.0.1, or send a key.",
        )  # fmt: skip
