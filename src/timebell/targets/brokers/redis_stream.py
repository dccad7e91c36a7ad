"""Deliver to a Redis stream with XADD, which Redis confirms with the id of the entry.

An entry has the fields `id` (the message id, for deduplication), `topic`, `attempt` and `body` (JSON). With
`ack: reported`, a marker key is written atomically with the entry. So an attempt is never added twice, and if the
marker is lost, the entry is lost too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from timebell.targets.base import Delivery, Outcome
from timebell.targets.brokers import redis_connection
from timebell.targets.brokers.broker import Broker, Message, invalid, text_option

MAX_STREAM_LENGTH = 1_000_000_000
# KEYS: stream, marker. ARGV: TTL of the marker in seconds, MAXLEN (0: none), then fields and values.
ADD_ONCE_SCRIPT = """
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
    """Options: `stream`; `maxLength`, the approximate number of entries to keep (XADD MAXLEN ~)."""

    kind = "redis-stream"
    option_names = frozenset({"stream", "maxLength"})

    def __init__(self, url: str | None, *, server: str, secret_key: str | None) -> None:
        super().__init__(url, server=server, secret_key=secret_key)
        self._connections = redis_connection.RedisConnections()

    def check_own_options(self, options: dict[str, Any]) -> dict[str, Any]:
        checked: dict[str, Any] = {"stream": text_option(options, "stream")}
        max_length = options.get("maxLength")
        if max_length is None:
            return checked
        if isinstance(max_length, bool) or not isinstance(max_length, int) or not 1 <= max_length <= MAX_STREAM_LENGTH:
            raise invalid(f"maxLength is {max_length!r:.60}; it must be from 1 to {MAX_STREAM_LENGTH}.")
        return checked | {"maxLength": max_length}

    async def publish(self, url: str, message: Message, options: dict[str, Any]) -> dict[str, Any]:
        client = self._connections.client_for(url)
        max_length = options.get("maxLength")
        fields: dict[Any, Any] = {
            "id": message.id, "topic": message.delivery.topic, "attempt": str(message.delivery.attempt),
            "body": message.encoded().decode(),
        }  # fmt: skip
        if options.get("ack") == "reported":
            pairs = [part for field in fields.items() for part in field]
            marker = redis_connection.marker_key(message.delivery)
            arguments = (options["stream"], marker, redis_connection.MARKER_TTL_SECONDS, max_length or 0, *pairs)
            entry = await client.register_script(ADD_ONCE_SCRIPT)(keys=list(arguments[:2]), args=list(arguments[2:]))
        else:
            entry = await client.xadd(options["stream"], fields, maxlen=max_length, approximate=True)
        return {"stream": options["stream"], "entry": entry}

    def outcome_of_error(self, error: Exception) -> Outcome | None:
        return redis_connection.outcome_of_error(error)

    async def find_lost(self, sent: Sequence[tuple[Delivery, dict[str, Any]]]) -> set[str]:
        """Return the job ids whose marker is gone."""
        by_url = defaultdict(list)
        for delivery, options in sent:
            by_url[self._connection_url(options)].append(delivery)
        lost: set[str] = set()
        for url, deliveries in by_url.items():
            lost |= await redis_connection.find_unmarked(self._connections.client_for(url), deliveries)
        return lost

    async def close(self) -> None:
        await self._connections.close()
