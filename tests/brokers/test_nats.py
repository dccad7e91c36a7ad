"""The target `nats` against a real NATS server with JetStream."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, ClassVar

import nats
from nats.js.api import StreamConfig
from nats.js.errors import NotFoundError

from tests.brokers.conformance import Conformance, Got, read
from tests.queue_servers import Nats


class TestNats(Conformance):
    kind = "nats"
    starts = Nats
    destination: ClassVar[dict[str, Any]] = {"subject": "mails.send"}
    missing: ClassVar[dict[str, Any]] = {"subject": "nowhere.send"}
    too_large = 30_000
    invalid: ClassVar[list[dict[str, Any]]] = [
        {}, {"subject": ""}, {"subject": "a b"}, {"subject": "a.*"}, {"subject": "a.>"}, {"subject": "a..b"},
        {"subject": ".a"}, {"subject": "$JS.API.STREAM.DELETE.mails"}, {"subject": "_INBOX.x"}, {"subject": ["a"]},
        {"subject": "a\r\nPUB b"}, {"subject": "a", "stream": "s"},
    ]  # fmt: skip

    def wrong_password(self, server: Any) -> str:
        return str(server.url.replace("timebell:secret", "timebell:secrets"))

    async def prepare(self, server: Any) -> None:
        client = await nats.connect(server.url)
        streams = client.jetstream()
        with contextlib.suppress(NotFoundError):
            await streams.delete_stream("mails")
        await streams.add_stream(StreamConfig(name="mails", subjects=["mails.>"], max_msg_size=20_000))
        await client.close()

    async def received(self, server: Any) -> list[Got]:
        client = await nats.connect(server.url)
        streams = client.jetstream()
        last = (await streams.stream_info("mails")).state.last_seq
        got = []
        for sequence in range(1, last + 1):
            message = await streams.get_msg("mails", sequence)
            assert message.headers is not None and message.data is not None
            got.append(Got(message.headers["Nats-Msg-Id"], read(message.data), message.headers))
        await client.close()
        return got

    def test_the_stream_drops_duplicates(self, server: Any) -> None:
        async def test() -> list[Got]:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                first, again = await deliver(self.destination), await deliver(self.destination, attempt=3)
                assert (first.result["stream"], first.result["duplicate"]) == ("mails", False)
                assert again.delivered and again.result["duplicate"]
                assert again.result["sequence"] == first.result["sequence"]
            return await self.received(server)

        assert len(asyncio.run(test())) == 1

    def test_a_message_above_the_limit_of_the_server_is_refused(self, server: Any) -> None:
        async def test() -> None:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                outcome = await deliver(self.destination, payload="x" * 2_000_000)
                assert (outcome.code, outcome.retryable) == ("MESSAGE_TOO_LARGE", False)

        asyncio.run(test())
