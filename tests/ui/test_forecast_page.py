"""The page of the forecast."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from .test_job_pages import plain_text

Serve = Callable[..., Any]


async def test_the_forecast_shows_the_load_and_largest_minute_of_each_span(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        start = browser.app.clock.now().replace(second=0, microsecond=0) + timedelta(hours=12, minutes=30)
        for minutes in (0, 0, 0, 1, 120):
            await browser.app.schedule_at("tick", start + timedelta(minutes=minutes))
        page = (await browser.get("/ui/forecast")).text
        largest = f"at {start:%a %d %b, %H:%M} UTC"
        assert "5 runs in the next 24 hours" in plain_text(page)
        assert re.findall(r"<title>(\d) at", page) == ["3", "1", "1"]  # spans of 6 minutes
        assert re.findall(r'class="num end f2">(\d)<', page) == ["4", "1"]  # spans of an hour
        assert plain_text(page).count(f"3 {largest}") == 2  # in the chart and in the table
