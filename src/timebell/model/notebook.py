"""HTML of jobs, schedules and pages for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def render_table(records: Sequence[Mapping[str, object]]) -> str:
    """Return an HTML table with a row for each record, and the names of the first one as its header."""
    from html import escape  # loads a long table of entities

    header = "".join(f"<th>{escape(name)}</th>" for name in (records[0] if records else ()))
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(str(value))}</td>' for value in record.values())}</tr>" for record in records
    )
    return f"<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>"
