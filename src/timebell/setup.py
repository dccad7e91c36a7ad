"""From settings to what a node is made of: its options and its targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from timebell.engine.context import Options
from timebell.errors import InvalidInput
from timebell.model.policy import Unheard
from timebell.model.routes import COMPLETES
from timebell.settings import Settings
from timebell.store.open import listening
from timebell.targets.base import Target


def options(chosen: Settings) -> Options:
    """How a node works."""
    return Options(
        slots=chosen.worker_concurrency, threads=chosen.worker_threads, lease=chosen.scheduler_lease,
        heartbeat=chosen.scheduler_heartbeat, drain=chosen.worker_drain_timeout,
        retention=chosen.retention_done, name=chosen.node_name,
    )  # fmt: skip


def offered(chosen: Settings) -> list[str]:
    """The kinds of targets that a node is set up for, besides handlers."""
    configured = {
        "http": chosen.webhook_signing_secret, "command": chosen.command_enabled, "alert": chosen.alert_urls,
    }  # fmt: skip
    return [kind for kind, value in configured.items() if value]


def target(kind: str, chosen: Settings, now: Callable[[], datetime]) -> Target:
    """A target of this kind. ImportError for http without the `server` extra."""
    if kind == "command":
        from timebell.targets.command import CommandTarget

        return CommandTarget(enabled=chosen.command_enabled)
    if kind == "alert":
        from timebell.engine.alert_target import AlertTarget
        from timebell.observe.alerts import Channels

        return AlertTarget(Channels(chosen.alert_urls))
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


def check_target(given: Any, unheard: Unheard | None, find: Callable[[str], Target]) -> dict[str, Any] | None:
    """A target as it is stored: {kind, options}, or None for handlers, of which `unheard` says what happens without.

    Raises InvalidInput (TARGET_UNKNOWN, ...), Refused.
    """
    if given is None:
        return COMPLETES if unheard is Unheard.COMPLETE else None
    asked = dict(given) if isinstance(given, Mapping) else {"kind": given}
    kind = asked.pop("kind", None)
    if kind == "handler":
        raise InvalidInput("The handler target is the default: leave target out.", code="TARGET_UNKNOWN")
    if kind not in ("http", "command"):
        raise InvalidInput(
            f"There is no target {kind!r:.60}.", code="TARGET_UNKNOWN", fix='Use {"kind": "http"} or "command".'
        )
    return {"kind": kind, "options": find(kind).check(asked)}
