"""Nodes over HTTP: listing, the leader, and draining."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timebell.ids import new_id

from .web import is_problem

Make = Callable[..., Any]


async def test_nodes_and_their_leader_are_listed(make: Make) -> None:
    async with make(open_here=False) as web:
        everywhere, ours = await web.key("platform", None), await web.key("viewer", "acme")

        @web.app.on("mail.send")
        async def send(event: Any) -> None: ...

        assert (await web.get("/nodes", key=ours)).json() == {
            "items": [], "nextCursor": None, "workers": [], "leader": None, "leaderChanges": 0, "leaderships": [],
        }  # fmt: skip
        web.app.schedule("digest", cron="0 9 * * *", timezone="UTC")(send)
        async with web.app.running() as service:
            while not (found := (await web.get("/nodes", key=everywhere)).json())["leader"]:
                pass
            (node,) = found["items"]
            assert (node["alive"], node["leader"], node["draining"]) == (True, True, False)
            assert node["routes"]["exact"] == ["@http:named", "digest", "mail.send"]
            assert found["leader"]["nodeId"] == node["id"]
            assert (found["leader"]["fence"], found["leaderChanges"]) == (1, 1)
            (leadership,) = found["leaderships"]
            assert (leadership["node"], leadership["endedAt"], leadership["resigned"]) == (node["name"], None, False)
            assert (node["running"], node["slots"]) == (0, 500)
            assert abs(node["clockAheadMs"]) < 5000
            assert (node["deployment"], node["defines"]) == (service.node.deployment.id, ["digest"])
            seen = (await web.get("/nodes", key=ours)).json()["items"][0]
            assert (seen["routes"], seen["deployment"], seen["defines"]) == (None, None, None)
            path = f"/nodes/{node['id']}/drain"
            is_problem(await web.post(path, key=await web.key("admin")), 403, "ROLE_TOO_LOW")
            for id_ in ("nothing", new_id(web.app.clock.now())):
                is_problem(await web.post(f"/nodes/{id_}/drain", key=everywhere), 404, "NODE_NOT_FOUND")
            assert (await web.post(path, key=everywhere)).json() == {"id": node["id"], "draining": True}
            assert (await web.get("/nodes", key=everywhere)).json()["items"][0]["draining"] is True
