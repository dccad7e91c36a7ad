"""A Timebell app with its API on a real port, for workers of brokers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from tests.api.web import SECRET
from tests.brokers.node import until
from timebell import Timebell
from timebell.api import server, v1
from timebell.engine.service import Service
from timebell.ids import new_id
from timebell.model.job import Job
from timebell.store.tenancy import api_keys as key_rows
from timebell.tenancy import keys
from timebell.tenancy.keys import Key
from timebell.tenancy.roles import Role


@dataclass
class Scene:
    """The app, its engine, and an API key of an operator for the workers."""

    app: Timebell
    service: Service
    key: str

    async def due(self, topic: str, target: dict[str, Any], **fields: Any) -> str:
        """Create a job that is due now; return its id."""
        return (await self.app.schedule_at(topic, timezone="UTC", target=target, **fields)).id

    async def job(self, id_: str, state: str, seconds: float = 120, **wanted: Any) -> Job:
        """Wait for a job state and these field values; return the job."""
        seen: Any = None

        async def there() -> Job | None:
            nonlocal seen
            seen = await self.app.get(id_)
            fits = all(getattr(seen, name) == value for name, value in wanted.items())
            return seen if seen.state == state and fits else None

        found: Job = await until(there, seconds, about=lambda: seen)
        return found


@asynccontextmanager
async def scene(url: str, **settings: Any) -> AsyncIterator[Scene]:
    """Run an engine and its API for the duration of the block."""
    listening = server.bind("127.0.0.1", 0)
    app = Timebell(url)
    app.settings = replace(
        app.settings, secret_key=SECRET, url=f"http://127.0.0.1:{listening.getsockname()[1]}", **settings
    )  # fmt: skip
    try:
        await app.open()
        id_, text = keys.generate_key()
        now = app.clock.now()
        key = Key(id=id_, tenant_id="default", name=new_id(now), role=Role.OPERATOR, created_at=now)
        await app.store.run(key_rows.create_key, key, keys.digest(SECRET, text))
        site = server.HttpApp(app, [v1.build_routes(app.features)], allow_local=False)
        async with server.serving(site, listening), app.running(heartbeat=0.1) as service:
            yield Scene(app, service, text)
    finally:
        await app.close()
