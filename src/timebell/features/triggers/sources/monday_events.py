"""Parse webhooks of monday.com, which report a changed item, and for some columns the new value.

Format: https://developer.monday.com/api-reference/docs/webhooks, an `event` with `pulseId` (or `itemId`), `boardId`,
`columnId`, `value` and `triggerTime`. Only the id of the item is required.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from timebell.errors import InvalidInput
from timebell.features.triggers.model.column_values import parse_column_instant
from timebell.features.triggers.model.trigger import WebhookNotice
from timebell.features.triggers.sources.monday import parse_column_value

DELETION_EVENTS = (
    "delete_pulse", "archive_pulse", "item_deleted", "item_archived", "subitem_deleted", "subitem_archived",
)  # fmt: skip
CLOCK_LEEWAY_SECONDS = 60.0  # tolerated difference between the clocks of monday.com and this machine


def parse_event(event: Any, board: str) -> WebhookNotice | None:
    """Parse an event; None if it is about another board, or about no item. Raises InvalidInput (INVALID_ITEM)."""
    if not isinstance(event, Mapping):
        raise InvalidInput("The event is not an object.", code="INVALID_ITEM", fix='Send {"event": {"pulseId": ...}}.')
    item, event_board = event.get("pulseId", event.get("itemId")), event.get("boardId")
    if isinstance(item, bool) or not re.fullmatch(r"\d{1,20}", str(item), re.ASCII):
        return None
    if event_board is not None and str(event_board) != board:
        return None
    at = parse_column_instant(event.get("triggerTime"), None) or _parse_epoch(event.get("changedAt"))
    column, value = event.get("columnId"), event.get("value")
    has_value = isinstance(column, str) and at is not None and "value" in event and _has_api_format(value)
    return WebhookNotice(
        key=str(item), at=at, deleted=event.get("type") in DELETION_EVENTS, column=column if has_value else None,
        value=parse_column_value(value) if has_value else None,
    )  # fmt: skip


def is_valid_token(token: str, secret: str, now: datetime, path: str) -> bool:
    """Return whether a JSON Web Token is signed with this secret (HS256, RFC 7515), not expired, and for this path."""
    head, _, remainder = token.partition(".")
    claims, _, signature = remainder.partition(".")
    expected_signature = hmac.new(secret.encode(), f"{head}.{claims}".encode(errors="replace"), sha256).digest()
    try:
        if not hmac.compare_digest(expected_signature, _decode_base64url(signature)):
            return False
        algorithm, payload = json.loads(_decode_base64url(head)).get("alg"), json.loads(_decode_base64url(claims))
        expires_at = (
            datetime.fromtimestamp(float(payload["exp"]) + CLOCK_LEEWAY_SECONDS, UTC) if "exp" in payload else None
        )
        audience = str(payload.get("aud", path)).partition("?")[0]
    except (ValueError, AttributeError, TypeError, OverflowError, binascii.Error):
        return False
    return algorithm == "HS256" and (expires_at is None or now < expires_at) and audience.rstrip("/").endswith(path)


def _has_api_format(value: Any) -> bool:
    """Return whether a webhook formats the value like the API: true for dates and people, not for other columns."""
    return value is None or (isinstance(value, Mapping) and ("date" in value or "personsAndTeams" in value))


def _parse_epoch(value: Any) -> datetime | None:
    """Return the instant of seconds since 1970; None if invalid."""
    try:
        return datetime.fromtimestamp(value, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _decode_base64url(part: str) -> bytes:
    return base64.urlsafe_b64decode(part.encode() + b"=" * (-len(part) % 4))
