"""Dashboard pages of campaigns."""

from __future__ import annotations

from pathlib import Path

from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.pages import NavigationEntry, Notice, Pages, SearchHit
from timebell.dashboard.views import View
from timebell.features.campaigns.pages import campaigns, devices, form, segments
from timebell.store.audit.overview import AttentionItem


def describe_attention(item: AttentionItem) -> Notice:
    """Describe a campaign that paused with a reason."""
    return Notice("warn", "paused", f"/ui/campaigns/{quote_segment(item.id)}", f"{item.name} is paused", f"{item.why}.")


async def search(view: View, text: str) -> list[SearchHit]:
    """Search the newest 200 campaigns by a part of the name."""
    newest = (await view.get("/campaigns", limit=200))["items"]
    return [
        SearchHit(each["name"], f"/ui/campaigns/{quote_segment(each['id'])}", "campaign")
        for each in newest
        if each["name"] and text.lower() in each["name"].lower()
    ]


PAGES = Pages(
    routers=(form.routes, segments.routes, devices.routes, campaigns.routes),
    templates=Path(__file__).parent / "templates",
    navigation=NavigationEntry(
        "campaigns", "/ui/campaigns", "Campaigns", "viewer",
        "M4 10v4h3l6 4V6l-6 4zM17 9a4 4 0 0 1 0 6M19.5 6.5a8 8 0 0 1 0 11",
    ),
    done_messages={
        "started": "Sending started.", "pausing": "Paused. Chunks in progress are completed.", "sending": "Resumed.",
        "approved": "Approved. Sending continues.", "stopping": "Stopped. Chunks in progress are completed.",
        "archived": "Archived. It is listed under “Archived”.", "unarchived": "Listed again.",
        "device-deleted": "Device deleted.", "segment-deleted": "Segment deleted.",
        "retrying": "Sending to the recipients not reached.", "tested": "Test sent as this job.",
    },
    describe_attention=describe_attention, search=search,
)  # fmt: skip
