"""Create a node's options and targets from the settings."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from timebell.client.validation import check_text, unknown_options
from timebell.errors import InvalidInput
from timebell.feature import Feature
from timebell.model.payload import encode
from timebell.model.policy import OnUnhandled, parse_seconds
from timebell.model.routes import COMPLETE_UNHANDLED, InternalTarget
from timebell.settings import Settings
from timebell.store.open import server_addresses
from timebell.targets import brokers
from timebell.targets.base import Delivery, Target, reject_unknown_options

if TYPE_CHECKING:
    from timebell.engine.leader.audit_export import AuditDestination
    from timebell.engine.node import NodeOptions

BUILT_IN_KINDS = frozenset({"handler", "http", "command", "alert"})
NAMED_HTTP_OPTIONS = ("auth", "tls", "proxy", "concurrency", "rate", "perSeconds")
"""Options of the kind `http` that only a named target has."""
_KIND = re.compile(r"[a-z][a-z0-9-]{0,29}")
log = logging.getLogger("timebell.wiring")


def target_kinds(features: Iterable[Feature]) -> tuple[str, ...]:
    """Return the target kinds that a job can specify, other than handlers and those of the app."""
    return ("http", "command", *(kind for feature in features for kind in feature.target_kinds), *sorted(brokers.KINDS))


def node_options(settings: Settings) -> NodeOptions:
    """Return the node options of these settings."""
    from timebell.engine.node import NodeOptions

    return NodeOptions(
        slots=settings.worker_concurrency, threads=settings.worker_threads, lease=settings.scheduler_lease,
        heartbeat=settings.scheduler_heartbeat, drain=settings.worker_drain_timeout,
        retention=settings.retention_done, name=settings.node_name, url=settings.url.rstrip("/"),
    )  # fmt: skip


def override_options(options: NodeOptions, overrides: Mapping[str, Any]) -> NodeOptions:
    """Return node options with the keyword options of `running`. Raises InvalidInput (UNKNOWN_OPTION, ...)."""
    if unknown := overrides.keys() - set(options.__slots__):
        raise unknown_options("running", unknown, options.__slots__)
    seconds = {
        name: parse_seconds(value, name)
        for name, value in overrides.items()
        if isinstance(getattr(options, name), float)
    }
    return dataclasses.replace(options, **{**overrides, **seconds})


def named_target_kinds(settings: Settings) -> list[str]:
    """Return the kinds of named targets that a node can deliver to.

    Their credentials are stored with the target, encrypted with the secret key, so that is all the node needs.
    """
    kinds = ["http", "command"] if settings.command_enabled else ["http"]
    return [*kinds, *_available_brokers(settings)] if settings.secret_key else []


def configured_target_kinds(settings: Settings, features: Iterable[Feature]) -> list[str]:
    """Return the target kinds for which a node is configured, other than handlers."""
    configured = {
        "http": settings.webhook_signing_secret, "command": settings.command_enabled, "alert": settings.alert_urls,
        **{kind: each.is_target_configured(kind, settings) for each in features for kind in each.target_kinds},
    }  # fmt: skip
    return [*(kind for kind, value in configured.items() if value), *_available_brokers(settings)]


def _available_brokers(settings: Settings) -> list[str]:
    """Return the broker kinds that have a URL and whose extra is installed."""
    available = []
    for kind in sorted(brokers.KINDS):
        if broker_url(kind, settings) is None:
            continue
        if brokers.is_installed(kind):
            available.append(kind)
        else:
            log.warning("target %s is configured, but its extra is not installed: not claiming its jobs", kind)
    return available


def broker_url(kind: str, settings: Settings) -> str | None:
    """Return the configured URL of a broker kind, or None."""
    url: str | None = getattr(settings, f"broker_{kind.replace('-', '_')}_url")
    return url


def create_target(
    kind: str, settings: Settings, now: Callable[[], datetime], features: Iterable[Feature] = ()
) -> Target:  # fmt: skip
    """Create a target of this kind.

    Raises ImportError for http without the `server` extra, Refused (EXTRA_MISSING, FCM_CREDENTIALS_MISSING).
    """
    for feature in features:
        if kind in feature.target_kinds:
            return feature.create_target(kind, settings, now)
    if kind == "command":
        from timebell.targets.command import CommandTarget

        return CommandTarget(enabled=settings.command_enabled)
    if kind == "alert":
        from timebell.engine.alert_target import AlertTarget
        from timebell.observe.alerts import Channels

        return AlertTarget(Channels(settings.alert_urls))
    if kind != "http":
        return brokers.create_broker(
            kind, broker_url(kind, settings), server=settings.url, secret_key=settings.secret_key
        )
    from timebell.targets.address import AddressGuard
    from timebell.targets.http import HttpTarget

    guard = AddressGuard(
        settings.webhook_allow_private, allow_http=settings.webhook_allow_private,
        allow=(settings.webhook_allow or "").replace(",", " ").split(),
        listeners=[
            (settings.http_host, settings.http_port),
            (settings.metrics_host, settings.metrics_port or settings.http_port),
            *server_addresses(settings.database_url),
        ],
    )  # fmt: skip
    return HttpTarget(
        settings.webhook_signing_secret, settings.webhook_timeout, now=now, guard=guard, secret_key=settings.secret_key
    )


def create_audit_destinations(settings: Settings, now: Callable[[], datetime]) -> Mapping[str, AuditDestination]:
    """Create the destinations of the audit log, by name. Raises InvalidInput (INVALID_AUDIT_URL)."""
    if settings.audit_webhook_url is None and settings.audit_syslog_url is None:
        return {}
    from timebell.engine.leader.audit_destinations import create_destinations

    return create_destinations(
        settings.audit_webhook_url, settings.audit_syslog_url, settings.webhook_signing_secret, settings.node_name, now
    )


def validate_custom_targets(targets: Iterable[Target], features: Iterable[Feature]) -> dict[str, Target]:
    """Return an app's custom targets by kind. Raises InvalidInput (INVALID_TARGET)."""
    by_kind: dict[str, Target] = {}
    known = {*BUILT_IN_KINDS, *target_kinds(features), *(k for each in features for k in each.internal_target_kinds)}
    for target in targets:
        kind = getattr(target, "kind", None)
        missing = [name for name in ("check", "deliver", "close") if not callable(getattr(target, name, None))]
        reserved = known | by_kind.keys()
        is_kind_valid = isinstance(kind, str) and _KIND.fullmatch(kind) and kind not in reserved
        if missing or not is_kind_valid or isinstance(target, type):
            problem = f"it has no {missing[0]}" if missing else f"its kind is {kind!r:.60}"
            raise InvalidInput(
                f"{target!r:.60} cannot be a target: {problem}.", code="INVALID_TARGET",
                fix="Use an object with check, deliver, close and a unique kind (lower-case letters, digits and -).",
            )  # fmt: skip
        by_kind[str(kind)] = target
    return by_kind


def normalize_target(
    target: Any,
    on_unhandled: OnUnhandled | None,
    find_target: Callable[[str], Target],
    custom_targets: Mapping[str, Target],
    features: Iterable[Feature],
) -> dict[str, Any] | None:
    """Return the stored form of a target: {kind, options}, or None for handlers with `on_unhandled` `hold`.

    A named target is only its name here; its kind is looked up when the job is inserted. `custom_targets` are the
    app's custom targets by kind. Raises InvalidInput (UNKNOWN_TARGET_KIND, ...), Refused.
    """
    if isinstance(target, InternalTarget):
        return dict(target)
    if target is None:
        return COMPLETE_UNHANDLED if on_unhandled is OnUnhandled.COMPLETE else None
    if isinstance(target, str):
        target = {"name": target}
    if isinstance(target, Mapping) and "name" in target:
        reject_unknown_options(dict(target), ("name",))
        return {"name": check_text(target["name"], "name")}
    options = dict(target) if isinstance(target, Mapping) else {"kind": target}
    kind = options.pop("kind", None)
    if kind == "handler":
        raise InvalidInput("The handler target is the default: omit target.", code="UNKNOWN_TARGET_KIND")
    validate_kind(kind, (*target_kinds(features), *custom_targets))
    if "signingSecrets" in options and kind not in custom_targets:
        raise InvalidInput(
            "Only named targets have their own signing secrets.", code="INVALID_TARGET_OPTIONS",
            fix="Create a target with these options, and use its name.",
        )  # fmt: skip
    if kind == "http" and (named_only := [name for name in NAMED_HTTP_OPTIONS if name in options]):
        raise InvalidInput(
            f"Only named targets have {named_only[0]}.", code="INVALID_TARGET_OPTIONS",
            fix="Create a target with these options, and use its name.",
        )  # fmt: skip
    if "connection" in options and kind not in custom_targets:
        raise InvalidInput(
            "A job cannot specify the connection of its queue.", code="INVALID_TARGET_OPTIONS",
            fix="Omit connection: the operator configures it.",
        )  # fmt: skip
    checked = {"kind": kind, "options": find_target(kind).check(options)}
    encode(checked, "target")  # validates the options of custom kinds as JSON
    return checked


def render_request(
    target: Mapping[str, Any] | None, delivery: Delivery, find_target: Callable[[str], Target]
) -> dict[str, Any] | None:
    """Return the request that a stored target would send: kind, body and kind-specific members; None for handlers.

    Raises InvalidPayload (INVALID_BODY, MESSAGE_TOO_LARGE).
    """
    if target is None or target.get("kind") in (None, "handler"):
        return None
    preview = getattr(find_target(target["kind"]), "preview", None)
    if preview is None:
        from timebell.targets import bodies

        return {"kind": target["kind"], "body": bodies.render(delivery, target["options"], "plain").data.decode()}
    return {"kind": target["kind"], **preview(delivery, target["options"])}


def validate_kind(kind: Any, kinds: Collection[str]) -> str:
    """Return `kind` if it is one of `kinds`. Raises InvalidInput (UNKNOWN_TARGET_KIND)."""
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidInput(
            "The target has no kind." if kind is None else f"There is no target {kind!r:.60}.",
            code="UNKNOWN_TARGET_KIND",
            fix=f'The kinds are {", ".join(kinds)}; use {{"name": ...}} for a named target.',
        )  # fmt: skip
    return kind
