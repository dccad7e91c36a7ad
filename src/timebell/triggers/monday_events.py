"""What monday.com's webhooks say: which item has changed, and of some columns what their value is now.

The shapes are those of https://developer.monday.com/api-reference/docs/webhooks: an `event` with `pulseId` (`itemId` of
some), `boardId`, `columnId`, `value` and `triggerTime`. Nothing but the item's id has to be there.
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
from timebell.model.trigger import Said, instant_of
from timebell.triggers.monday import value_of

GONE = (
    "delete_pulse", "archive_pulse", "item_deleted", "item_archived", "subitem_deleted", "subitem_archived",
)  # fmt: skip
LEEWAY = 60.0  # seconds by which their clock and ours may differ


def said(event: Any, board: str) -> Said | None:
    """What an event says; None if it is of another board, or of no item. Raises InvalidInput (INVALID_ITEM)."""
    if not isinstance(event, Mapping):
        raise InvalidInput("The event is no object.", code="INVALID_ITEM", fix='Send {"event": {"pulseId": ...}}.')
    item, of = event.get("pulseId", event.get("itemId")), event.get("boardId")
    if isinstance(item, bool) or not re.fullmatch(r"\d{1,20}", str(item), re.ASCII):
        return None
    if of is not None and str(of) != board:
        return None
    at = instant_of(event.get("triggerTime"), None) or _changed(event.get("changedAt"))
    column, value = event.get("columnId"), event.get("value")
    told = isinstance(column, str) and at is not None and "value" in event and _plain(value)
    return Said(
        key=str(item), at=at, gone=event.get("type") in GONE, column=column if told else None,
        value=value_of(value) if told else None,
    )  # fmt: skip


def signed(token: str, secret: str, now: datetime, path: str) -> bool:
    """Whether a JSON Web Token is under this secret (HS256, RFC 7515), not over, and for this path."""
    head, _, rest = token.partition(".")
    claims, _, signature = rest.partition(".")
    right = hmac.new(secret.encode(), f"{head}.{claims}".encode(errors="replace"), sha256).digest()
    try:
        if not hmac.compare_digest(right, _decoded(signature)):
            return False
        algorithm, read = json.loads(_decoded(head)).get("alg"), json.loads(_decoded(claims))
        over = datetime.fromtimestamp(float(read["exp"]) + LEEWAY, UTC) if "exp" in read else None
        audience = str(read.get("aud", path)).partition("?")[0]
    except (ValueError, AttributeError, TypeError, OverflowError, binascii.Error):
        return False
    return algorithm == "HS256" and (over is None or now < over) and audience.rstrip("/").endswith(path)


def _plain(value: Any) -> bool:
    """Whether a webhook writes it as the API does: dates and people; other columns have shapes of their own there."""
    return value is None or (isinstance(value, Mapping) and ("date" in value or "personsAndTeams" in value))


def _changed(given: Any) -> datetime | None:
    """Seconds since 1970."""
    try:
        return datetime.fromtimestamp(given, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _decoded(part: str) -> bytes:
    return base64.urlsafe_b64decode(part.encode() + b"=" * (-len(part) % 4))
