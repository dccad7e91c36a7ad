"""From settings to what a node is made of: its options and its targets."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from timebell.client.validation import text
from timebell.engine.node import Options
from timebell.errors import InvalidInput, Refused
from timebell.model.payload import encode
from timebell.model.policy import Unheard
from timebell.model.routes import COMPLETES
from timebell.observe.counters import Counters
from timebell.settings import Settings
from timebell.store.campaigns.campaigns import TARGET as CAMPAIGN
from timebell.store.dialects.base import Store
from timebell.store.open import listening
from timebell.targets import bodies, brokers
from timebell.targets.base import Delivery, Target, only
from timebell.tenancy.secrets import Keyring

BUILT_IN = frozenset({"handler", "http", "command", "alert", "push", "campaign"})
_KIND = re.compile(r"[a-z][a-z0-9-]{0,29}")
log = logging.getLogger("timebell.setup")

KINDS = ("http", "command", "push", *sorted(brokers.KINDS))
"""The kinds of targets that a job may go to, besides handlers."""


def options(chosen: Settings) -> Options:
    """How a node works."""
    return Options(
        slots=chosen.worker_concurrency, threads=chosen.worker_threads, lease=chosen.scheduler_lease,
        heartbeat=chosen.scheduler_heartbeat, drain=chosen.worker_drain_timeout,
        retention=chosen.retention_done, name=chosen.node_name,
    )  # fmt: skip


def nameable(chosen: Settings) -> list[str]:
    """The kinds that a node can deliver to by name: what such a target needs is its own, under the secret key."""
    kinds = ["http", "command"] if chosen.command_enabled else ["http"]
    return [*kinds, *_queues(chosen)] if chosen.secret_key else []


def offered(chosen: Settings) -> list[str]:
    """The kinds of targets that a node is set up for, besides handlers."""
    configured = {
        "http": chosen.webhook_signing_secret, "command": chosen.command_enabled, "alert": chosen.alert_urls,
        "push": chosen.fcm_credentials,
    }  # fmt: skip
    return [*(kind for kind, value in configured.items() if value), *_queues(chosen)]


def _queues(chosen: Settings) -> list[str]:
    """The kinds of outside queues that have a connection and their extra."""
    found = []
    for kind in sorted(brokers.KINDS):
        if broker_url(kind, chosen) is None:
            continue
        if brokers.installed(kind):
            found.append(kind)
        else:
            log.warning("target %s is configured, but its extra is not installed: this node leaves its jobs", kind)
    return found


def broker_url(kind: str, chosen: Settings) -> str | None:
    """The connection that the operator gave this kind of queue."""
    url: str | None = getattr(chosen, f"broker_{kind.replace('-', '_')}_url")
    return url


def target(kind: str, chosen: Settings, now: Callable[[], datetime]) -> Target:
    """A target of this kind. ImportError for http without the `server` extra; raises Refused (EXTRA_MISSING)."""
    if kind == "command":
        from timebell.targets.command import CommandTarget

        return CommandTarget(enabled=chosen.command_enabled)
    if kind == "push":
        return push_target(chosen, now)
    if kind == "alert":
        from timebell.engine.alert_target import AlertTarget
        from timebell.observe.alerts import Channels

        return AlertTarget(Channels(chosen.alert_urls))
    if kind != "http":
        return brokers.broker(kind, broker_url(kind, chosen), server=chosen.url, secret_key=chosen.secret_key)
    from timebell.targets.address import AddressGuard
    from timebell.targets.http import HttpTarget

    guard = AddressGuard(
        chosen.webhook_allow_private, allow_http=chosen.webhook_allow_private,
        allow=(chosen.webhook_allow or "").replace(",", " ").split(),
        listeners=[
            (chosen.http_host, chosen.http_port), (chosen.metrics_host, chosen.metrics_port or chosen.http_port),
            *listening(chosen.database_url),
        ],
    )  # fmt: skip
    return HttpTarget(
        chosen.webhook_signing_secret, chosen.webhook_timeout, now=now, guard=guard, secret_key=chosen.secret_key
    )


def push_target(chosen: Settings, now: Callable[[], datetime]) -> Target:
    """The target `push`. Raises Refused (FCM_CREDENTIALS_MISSING, EXTRA_MISSING)."""
    from timebell.targets.push.google import check_installed
    from timebell.targets.push.provider import Provider
    from timebell.targets.push.target import PushTarget

    credentials = chosen.fcm_credentials
    if credentials is None:
        raise Refused(
            "There are no credentials of FCM to push with.", code="FCM_CREDENTIALS_MISSING",
            fix="Set TIMEBELL_FCM_CREDENTIALS_FILE to the JSON key of a service account.",
        )  # fmt: skip

    check_installed()

    def provider() -> Provider:
        from timebell.targets.push.fcm import FcmProvider

        return FcmProvider(
            credentials, now=now, url=chosen.fcm_url, connections=chosen.fcm_connections,
            per_minute=chosen.fcm_messages_per_minute,
        )  # fmt: skip

    return PushTarget(provider, now)


def count_messages(kinds: Mapping[str, Target], counters: Counters) -> None:
    """Have campaigns count what became of their messages."""
    if "campaign" in kinds:
        from timebell.campaigns.target import CampaignTarget

        target = kinds["campaign"]
        if isinstance(target, CampaignTarget):
            target.messages = counters.messages


def campaign_target(
    store: Store, push: Target, ring: Callable[[], Keyring], poke: Callable[[], None], now: Callable[[], datetime]
) -> Target:
    """What sends the chunks of campaigns, over the provider of `push`, which learns whose which device is; `poke` wakes
    the worker."""
    from timebell.campaigns.outside import Outside
    from timebell.campaigns.registry import StoredRegistry
    from timebell.campaigns.target import CampaignTarget
    from timebell.targets.push.target import PushTarget

    assert isinstance(push, PushTarget)
    with suppress(InvalidInput, Refused):  # said by the first job that needs it
        push.warm()  # what it imports takes longer than a first message may
    push.registry = StoredRegistry(store, now)
    return CampaignTarget(store, push, Outside(store, ring, now), poke, now)


def own_targets(targets: Iterable[Target]) -> dict[str, Target]:
    """An app's own kinds of targets. Raises InvalidInput (TARGET_INVALID)."""
    found: dict[str, Target] = {}
    for one in targets:
        kind = getattr(one, "kind", None)
        lacks = [name for name in ("check", "deliver", "close") if not callable(getattr(one, name, None))]
        named = isinstance(kind, str) and _KIND.fullmatch(kind) and kind not in {*BUILT_IN, *brokers.KINDS, *found}
        if lacks or not named or isinstance(one, type):
            why = f"it has no {lacks[0]}" if lacks else f"its kind is {kind!r:.60}"
            raise InvalidInput(
                f"{one!r:.60} cannot be a target: {why}.", code="TARGET_INVALID",
                fix="Give an object with check, deliver and close, and a kind of its own: small letters, digits and -.",
            )  # fmt: skip
        found[str(kind)] = one
    return found


def check_target(
    given: Any, unheard: Unheard | None, find: Callable[[str], Target], own: Mapping[str, Target]
) -> dict[str, Any] | None:
    """A target as it is stored: {kind, options}, or None for handlers, of which `unheard` says what happens without.

    Of one under a name, the name alone: its kind is looked up when it is written. `own` are the app's kinds.
    Raises InvalidInput (TARGET_UNKNOWN, ...), Refused.
    """
    if given is CAMPAIGN:  # of a schedule of campaigns: nobody else has this very object
        return dict(CAMPAIGN)
    if given is None:
        return COMPLETES if unheard is Unheard.COMPLETE else None
    if isinstance(given, str):
        given = {"name": given}
    if isinstance(given, Mapping) and "name" in given:
        only(dict(given), ("name",))
        return {"name": text(given["name"], "name")}
    asked = dict(given) if isinstance(given, Mapping) else {"kind": given}
    kind = asked.pop("kind", None)
    if kind == "handler":
        raise InvalidInput("The handler target is the default: leave target out.", code="TARGET_UNKNOWN")
    known_kind(kind, own)
    if "signingSecrets" in asked and kind not in own:
        raise InvalidInput("Only targets under a name sign with secrets of their own.", code="TARGET_OPTIONS_INVALID")
    if "connection" in asked and kind not in own:
        raise InvalidInput(
            "A job does not say where its queue is.", code="TARGET_OPTIONS_INVALID",
            fix="Leave connection out: the operator sets it.",
        )  # fmt: skip
    checked = {"kind": kind, "options": find(kind).check(asked)}
    encode(checked, "target")  # of a kind of one's own nobody else has looked
    return checked


def request_of(
    target: Mapping[str, Any] | None, delivery: Delivery, find: Callable[[str], Target]
) -> dict[str, Any] | None:
    """What would be sent to a target as it is stored: its kind, its body and what goes with it; None for handlers.

    Raises InvalidPayload (BODY_UNFIT, MESSAGE_TOO_LARGE).
    """
    if target is None or target.get("kind") in (None, "handler"):
        return None
    preview = getattr(find(target["kind"]), "preview", None)
    if preview is None:
        return {"kind": target["kind"], "body": bodies.render(delivery, target["options"], "plain").data.decode()}
    return {"kind": target["kind"], **preview(delivery, target["options"])}


def known_kind(kind: Any, own: Collection[str] = ()) -> str:
    """A kind that there is. Raises InvalidInput (TARGET_UNKNOWN)."""
    kinds = (*KINDS, *own)
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidInput(
            f"There is no target {kind!r:.60}.", code="TARGET_UNKNOWN",
            fix=f'The kinds are {", ".join(kinds)}; {{"name": ...}} is one that was made before.',
        )  # fmt: skip
    return kind
