"""Deliver into a Redis stream: XADD, confirmed by Redis with the id of the entry.

An entry has the fields `id` (the message's id: drop what you have seen), `topic`, `attempt` and `body` (JSON). With
`ack: reported` a mark goes in beside it, in the same step; so the same attempt is never added twice, and a Redis
that has lost the mark has lost the entry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from timebell.targets.base import Delivery, Outcome
from timebell.targets.brokers import redis_connection
from timebell.targets.brokers.broker import Broker, Message, invalid, word

LONGEST = 1_000_000_000
# KEYS: the stream, the mark. ARGV: how long the mark holds, MAXLEN (0: none), fields and values.
ADD_ONCE = """
local before = redis.call('GET', KEYS[2])
if before then return before end
local command = {'XADD', KEYS[1]}
if ARGV[2] ~= '0' then for _, word in ipairs({'MAXLEN', '~', ARGV[2]}) do table.insert(command, word) end end
table.insert(command, '*')
for at = 3, #ARGV do table.insert(command, ARGV[at]) end
local entry = redis.call(unpack(command))
redis.call('SET', KEYS[2], entry, 'EX', ARGV[1])
return entry
"""


class RedisStreamTarget(Broker):
    """Options: `stream`; `maxLength`: about how many entries it keeps (XADD MAXLEN ~), the oldest go."""

    kind = "redis-stream"
    options = frozenset({"stream", "maxLength"})

    def __init__(self, url: str | None, *, server: str, secret_key: str | None) -> None:
        super().__init__(url, server=server, secret_key=secret_key)
        self._connections = redis_connection.Connections()

    def read(self, options: dict[str, Any]) -> dict[str, Any]:
        read: dict[str, Any] = {"stream": word(options, "stream")}
        most = options.get("maxLength")
        if most is None:
            return read
        if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= LONGEST:
            raise invalid(f"maxLength is {most!r:.60}; it goes from 1 to {LONGEST}.")
        return read | {"maxLength": most}

    async def publish(self, url: str, message: Message, options: dict[str, Any]) -> dict[str, Any]:
        client = self._connections.to(url)
        most = options.get("maxLength")
        fields: dict[Any, Any] = {
            "id": message.id, "topic": message.delivery.topic, "attempt": str(message.delivery.attempt),
            "body": message.encoded().decode(),
        }  # fmt: skip
        if options.get("ack") == "reported":
            words = [part for field in fields.items() for part in field]
            mark = redis_connection.mark_of(message.delivery)
            given = (options["stream"], mark, redis_connection.MARK_SECONDS, most or 0, *words)
            entry = await client.register_script(ADD_ONCE)(keys=list(given[:2]), args=list(given[2:]))
        else:
            entry = await client.xadd(options["stream"], fields, maxlen=most, approximate=True)
        return {"stream": options["stream"], "entry": entry}

    def failure(self, error: Exception) -> Outcome | None:
        return redis_connection.failure(error)

    async def lost(self, sent: Sequence[tuple[Delivery, dict[str, Any]]]) -> set[str]:
        """Those whose mark is gone."""
        by_url = defaultdict(list)
        for delivery, options in sent:
            by_url[self._connection(options)].append(delivery)
        gone: set[str] = set()
        for url, deliveries in by_url.items():
            gone |= await redis_connection.unmarked(self._connections.to(url), deliveries)
        return gone

    async def close(self) -> None:
        await self._connections.close()
