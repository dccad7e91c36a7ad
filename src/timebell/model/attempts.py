"""The attempt records of a job: one per attempt that failed or was delivered to a target outside Python."""

from __future__ import annotations

from typing import Any

from timebell.errors import InvalidPayload
from timebell.model.payload import encode

MAX_RECORDED_ATTEMPTS = 20
MAX_RECORD_BYTES = MAX_RECORDED_ATTEMPTS * 16_384

AttemptRecord = dict[str, Any]


def encode_recent(records: list[AttemptRecord]) -> str:
    """Encode the newest records as JSON; above MAX_RECORD_BYTES, only the newest one keeps its response.

    At most MAX_RECORDED_ATTEMPTS are encoded. Raises InvalidPayload if the result is still too large.
    """
    records = records[-MAX_RECORDED_ATTEMPTS:]
    try:
        return encode(records, "attempts", limit=MAX_RECORD_BYTES)
    except InvalidPayload:
        for record in records[:-1]:
            record.pop("response", None)
        return encode(records, "attempts", limit=MAX_RECORD_BYTES)


def merge_delivery(records: list[AttemptRecord], delivery: AttemptRecord) -> list[AttemptRecord]:
    """Return `records` with a delivery record merged in, ordered by attempt.

    Fields of an existing record of the same attempt win: they were written when the attempt completed, which can
    happen before its delivery is recorded.
    """
    number = delivery["attempt"]
    same = [record for record in records if record.get("attempt", 0) == number]
    others = [record for record in records if record.get("attempt", 0) != number]
    merged = {**delivery, **(same[-1] if same else {})}
    return sorted([*others, merged], key=lambda record: record.get("attempt", 0))
