"""Version of the tables that this release creates, and the error for other versions."""

from __future__ import annotations

from collections.abc import Sequence

from timebell.errors import SchemaOutdated

VERSION_TABLE = "timebell_version"
HEAD = "0001"
WORKS_SINCE = "0001"
"""The HEAD of the oldest release that works on the tables of this HEAD.

A migration that only adds things older releases can ignore (a nullable column or one with a default, a table, an index)
does not change it. A migration that removes something or changes its meaning sets it to the first release that worked
without it.
"""


def schema_outdated(url: str, found_version: str | None, missing: Sequence[str] = ()) -> SchemaOutdated:
    """Create the error for a database whose tables do not fit this release, or lack those `missing` of a feature."""
    if found_version is not None and found_version > HEAD:
        return SchemaOutdated(
            f"The database {url.split('@')[-1]} has the tables of a newer release ({found_version});"
            f" this one supports {HEAD}.",
            fix="Upgrade this program.",
        )
    state = f"has the tables of version {found_version}" if found_version else "has no Timebell tables yet"
    needed = f"this release needs {HEAD}"
    if found_version == HEAD:
        state, needed = f"lacks the table {missing[0]}", "an enabled feature needs it"
    return SchemaOutdated(
        f"The database {url.split('@')[-1]} {state}; {needed}.", fix="Run: timebell db upgrade, or await app.upgrade()."
    )
