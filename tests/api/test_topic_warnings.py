"""Creating work for a topic that no running node handles succeeds with a warning and a suggestion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timebell.api import topic_warnings
from timebell.ids import new_id
from timebell.model.routes import Routes
from timebell.store.cluster import nodes

from .web import NIGHTLY

Make = Callable[..., Any]
LATER = "2040-01-01T00:00:00Z"


async def test_an_unhandled_topic_is_warned_about(make: Make) -> None:
    async with make() as web:
        assert "warnings" not in (await web.post("/jobs", {"topic": "bling.invoice", "runAt": LATER})).json()
        topic_warnings._handled.clear()
        now = web.app.clock.now()
        routes = Routes(exact=frozenset({"billing.invoice"}), prefixes=frozenset({"mail."}))
        await web.app.store.run(nodes.announce, nodes.Node(new_id(now), "n1", "1", "2026a", routes, 1, now, now))

        async def warnings(path: str, body: dict[str, object]) -> list[str]:
            answer = await web.post(path, body)
            assert answer.status_code in (200, 201), answer.text
            return answer.json().get("warnings", [])  # type: ignore[no-any-return]

        (warning,) = await warnings("/jobs", {"topic": "billing.invoce", "runAt": LATER})
        assert warning == (
            "No running node handles billing.invoce: its jobs wait until one does. Did you mean billing.invoice?"
        )
        assert len(await warnings("/schedules", {**NIGHTLY, "name": "s", "jobType": "nobody.knows"})) == 1
        (listed,) = (await web.get("/schedules")).json()["items"]
        assert len(listed["warnings"]) == 1
        assert (await web.get(f"/schedules/{listed['id']}")).json()["warnings"] == listed["warnings"]
        assert len(await warnings("/schedules/preview", {**NIGHTLY, "name": "p", "jobType": "billing.invoce"})) == 1
        assert (await web.post("/sources", {"name": "shifts"})).status_code == 201
        trigger = {"name": "t", "source": "shifts", "column": "start_at", "timezone": "UTC", "topic": "mial.send"}
        assert len(await warnings("/triggers", trigger)) == 1
        assert len((await web.get("/triggers/t")).json()["warnings"]) == 1
        for topic in ("billing.invoice", "mail.send"):
            assert await warnings("/jobs", {"topic": topic, "runAt": LATER}) == []
            assert await warnings("/schedules", {**NIGHTLY, "name": topic, "jobType": topic}) == []
