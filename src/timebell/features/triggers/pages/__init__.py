"""Dashboard pages of triggers and sources."""

from __future__ import annotations

from pathlib import Path

from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.pages import NavigationEntry, Notice, Pages, SearchHit
from timebell.dashboard.views import View
from timebell.features.triggers.pages import form, source_form, triggers
from timebell.features.triggers.pages.triggers import REAUTHORIZATION_ERROR
from timebell.store.audit.overview import AttentionItem


def describe_attention(item: AttentionItem) -> Notice:
    """Describe a source that cannot be read."""
    reason = item.why or ""
    if REAUTHORIZATION_ERROR in reason:
        return Notice("warn", "retry", "/ui/triggers", f"Source {item.name} needs a new token", reason)
    return Notice("bad", "bad", "/ui/triggers", f"Source {item.name} is unreadable", reason)


async def search(view: View, text: str) -> list[SearchHit]:
    """Search the newest 200 triggers by a part of the name."""
    newest = (await view.get("/triggers", limit=200))["items"]
    return [
        SearchHit(each["name"], f"/ui/triggers/{quote_segment(each['name'])}", "trigger")
        for each in newest
        if each["name"] and text.lower() in each["name"].lower()
    ]


PAGES = Pages(
    routers=(form.routes, source_form.routes, triggers.routes),
    templates=Path(__file__).parent / "templates",
    navigation=NavigationEntry("triggers", "/ui/triggers", "Triggers", "viewer", "M13 2 5 14h6l-1 8 8-12h-6z"),
    done_messages={"scanning": "Scan started.", "watching": "Created. Scanning the existing items.",
        "item-fired": "Fired.", "item-skipped": "Skipped."},
    describe_attention=describe_attention, search=search,
)  # fmt: skip
