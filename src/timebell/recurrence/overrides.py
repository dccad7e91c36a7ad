"""Overrides of a schedule whose recurrence is replaced."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from timebell.recurrence.recurrence import Override, Recurrence


def partition_overrides(
    overrides: Sequence[Override], recurrence: Recurrence, since: datetime
) -> tuple[tuple[Override, ...], tuple[Override, ...]]:
    """Return the overrides to keep and those to drop when `recurrence` replaces another one from `since` on.

    A future override is dropped if its occurrence does not exist in the new recurrence, or if it is moved to an instant
    at which the recurrence has an occurrence anyway. A past one is kept if the occurrence was moved to a free instant
    after `since`; all other past overrides are in neither result.
    """
    applicable: list[Override] = []
    dropped: list[Override] = []
    for override in overrides:
        is_occupied = override.to is not None and recurrence.has(override.to)
        if override.at > since:
            (applicable if recurrence.has(override.at) and not is_occupied else dropped).append(override)
        elif override.to is not None and override.to > since and not is_occupied:
            applicable.append(override)
    return tuple(applicable), tuple(dropped)
