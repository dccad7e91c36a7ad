"""From settings to what a node is made of: its options and its targets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from timebell.client.jobs import text
from timebell.engine.context import Options
from timebell.errors import InvalidInput, Refused
from timebell.model.policy import Unheard
from timebell.model.routes import COMPLETES
from timebell.settings import Settings
from timebell.store.dialects.base import Store
from timebell.store.open import listening
from timebell.store.sql.campaigns import TARGET as CAMPAIGN
from timebell.targets import brokers
from timebell.targets.base import Target, only
from timebell.tenancy.secrets import Keyring

log = logging.getLogger("timebell.setup")

KINDS = ("http", "command", *sorted(brokers.KINDS))
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
        push.provider()  # what it imports takes longer than a first message may
    push.registry = StoredRegistry(store, now)
    return CampaignTarget(store, push, Outside(store, ring, now), poke, now)


def check_target(given: Any, unheard: Unheard | None, find: Callable[[str], Target]) -> dict[str, Any] | None:
    """A target as it is stored: {kind, options}, or None for handlers, of which `unheard` says what happens without.

    Of one under a name, the name alone: its kind is looked up when it is written.
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
    if "signingSecrets" in asked:
        raise InvalidInput("Only targets under a name sign with secrets of their own.", code="TARGET_OPTIONS_INVALID")
    if "connection" in asked:
        raise InvalidInput(
            "A job does not say where its queue is.", code="TARGET_OPTIONS_INVALID",
            fix="Leave connection out: the operator sets it.",
        )  # fmt: skip
    return {"kind": kind, "options": find("push" if kind == "push" else known_kind(kind)).check(asked)}


def known_kind(kind: Any) -> str:
    """A kind that there is. Raises InvalidInput (TARGET_UNKNOWN)."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise InvalidInput(
            f"There is no target {kind!r:.60}.", code="TARGET_UNKNOWN",
            fix=f'The kinds are {", ".join((*KINDS, "push"))}; or give {{"name": ...}} of one that was made before.',
        )  # fmt: skip
    return kind
