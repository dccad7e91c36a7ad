"""An emulator of the Kafka protocol, not a Kafka broker: `python tests/kafka_stand_in.py PORT FOLDER`.

It supports the requests of an idempotent producer on one node: topic metadata, producer ids, SASL (PLAIN and SCRAM),
and record batches, whose checksum, producer id, epoch and sequence are checked. Confirmed records are in one file per
partition, from which the state is restored after a kill. It has no replicas, consumers or transactions, and proves
nothing about the durability, elections or timing of Kafka.

It is stricter than Kafka: it creates no topics automatically, accepts only `acks=all` and numbered batches, and expects
sequence 0 from unknown producers. It is laxer in one point: unauthenticated clients are accepted, too.

Tests set the topic and the refused requests in `rules.json` (`Rules`), and read the written records with `ledger`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import secrets
import sys
from collections import deque, namedtuple
from collections.abc import Generator, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from aiokafka.protocol.admin import ApiVersionRequest_v0, SaslAuthenticateRequest_v0, SaslHandShakeRequest_v1
from aiokafka.protocol.api import RequestHeader_v1, ResponseHeader_v0
from aiokafka.protocol.metadata import MetadataRequest_v5
from aiokafka.protocol.produce import ProduceRequest_v7
from aiokafka.protocol.transaction import InitProducerIdRequest_v0
from aiokafka.record.default_records import DefaultRecordBase, DefaultRecordBatch
from aiokafka.record.util import calc_crc32c

USER, PASSWORD = "timebell", "secret"
LARGEST = 1_048_588
"""Bytes of a batch that Kafka takes by default."""
REMEMBERED = 5
"""Batches of a producer whose repetition Kafka knows."""

OK, CORRUPT, UNKNOWN_TOPIC, TOO_LARGE, INVALID_ACKS, BAD_SASL, INVALID_REQUEST = 0, 2, 3, 10, 21, 33, 42
OLD_FORMAT, OUT_OF_ORDER, SEEN_BEFORE, OLD_EPOCH, WRONG_PASSWORD = 43, 45, 46, 47, 58

_REQUESTS = {
    kind.API_KEY: kind
    for kind in (
        ProduceRequest_v7, MetadataRequest_v5, SaslHandShakeRequest_v1, ApiVersionRequest_v0, InitProducerIdRequest_v0,
        SaslAuthenticateRequest_v0,
    )
}  # fmt: skip
_MECHANISMS = {"PLAIN": None, "SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}


class Rules:
    """The behavior of the emulator in a folder, set from another process. `make` also resets it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self, topic: str, partitions: int = 3, **rules: Any) -> None:
        """Create the only topic, empty."""
        self.set(topic=topic, partitions=partitions, log=secrets.token_hex(8), **rules)

    def set(self, **rules: Any) -> None:
        """`hidden`, `write`, `producer`: error codes for topic metadata, writes, and producer ids.
        `largest`: bytes of a batch. `hang_up`: disconnect once, during the request or after the write is stored.
        """
        kept = {} if "topic" in rules else self.read()
        new = self._folder / "rules.new"
        new.write_text(json.dumps(kept | rules))
        new.replace(self._folder / "rules.json")

    def read(self) -> dict[str, Any]:
        try:
            rules: dict[str, Any] = json.loads((self._folder / "rules.json").read_text())
        except FileNotFoundError:
            return {}
        return rules

    def hang_up(self, when: str) -> bool:
        """Return whether to disconnect now; true only once."""
        if self.read().get("hang_up") != when:
            return False
        self.set(hang_up=None)
        return True

    def log(self, partition: int) -> Path:
        return self._folder / f"{self.read()['log']}-{partition}.log"


def ledger(folder: Path) -> list[Any]:
    """Return all records of the topic, ordered per partition: `key`, `value`, `headers`, `offset`."""
    rules = Rules(folder)
    logs = [rules.log(number) for number in range(rules.read()["partitions"])]
    return [
        record
        for log in logs if log.exists()
        for batch in batches(log.read_bytes())
        for record in DefaultRecordBatch(batch)
    ]  # fmt: skip


def batches(data: bytes) -> Iterator[bytes]:
    """Yield the complete record batches, without a partial one at the end."""
    while len(data) >= 12 and len(data) >= (size := 12 + int.from_bytes(data[8:12])):
        yield data[:size]
        data = data[size:]


class Batch(
    namedtuple(
        "Batch",
        "base_offset length leader_epoch magic crc attributes last_delta first_timestamp max_timestamp producer epoch "
        "first records",
    )
):
    """The header of a record batch in wire format."""

    @property
    def last(self) -> int:
        return int(self.first + self.last_delta)


class Partition:
    """One log with the sequences of its producers."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 - open while the server runs
        self._file.seek(0)
        self.end = kept = 0
        self._seen: dict[int, deque[Batch]] = {}
        for data in batches(self._file.read()):
            kept += len(data)
            self._remember(Batch(*DefaultRecordBase.HEADER_STRUCT.unpack_from(data)))
        self._file.truncate(kept)

    def append(self, data: bytes, largest: int) -> tuple[int, int]:
        """Append a batch; return (error code, offset). A repeated batch gets its original offset."""
        if len(data) > largest:
            return TOO_LARGE, -1
        if [data] != list(batches(data)) or len(data) < DefaultRecordBase.HEADER_STRUCT.size:
            return CORRUPT, -1
        batch = Batch(*DefaultRecordBase.HEADER_STRUCT.unpack_from(data))
        if batch.magic != 2:
            return OLD_FORMAT, -1
        if batch.crc != calc_crc32c(data[DefaultRecordBase.ATTRIBUTES_OFFSET :]):
            return CORRUPT, -1
        if batch.producer < 0 or batch.records != batch.last_delta + 1:
            return INVALID_REQUEST, -1
        seen = self._seen.get(batch.producer, ())
        for old in seen:
            if (old.epoch, old.first, old.last) == (batch.epoch, batch.first, batch.last):
                return OK, old.base_offset
        before = seen[-1] if seen else None
        if before is not None and batch.epoch < before.epoch:
            return OLD_EPOCH, -1
        due = before.last + 1 if before is not None and batch.epoch == before.epoch else 0
        if batch.first != due:
            return (SEEN_BEFORE if batch.first < due else OUT_OF_ORDER), -1
        batch = batch._replace(base_offset=self.end)
        self._file.write(self.end.to_bytes(8) + data[8:])
        self._remember(batch)
        return OK, batch.base_offset

    def _remember(self, batch: Batch) -> None:
        self.end = batch.base_offset + batch.records
        self._seen.setdefault(batch.producer, deque(maxlen=REMEMBERED)).append(batch)


class StandIn:
    def __init__(self, port: int, folder: Path) -> None:
        self._port = port
        self._rules = Rules(folder)
        self._partitions: dict[Path, Partition] = {}

    async def run(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        signing: Generator[bytes, bytes, None] | None = None
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4))
                head = await reader.readexactly(2)
                produces = int.from_bytes(head) == ProduceRequest_v7.API_KEY
                if produces and self._rules.hang_up("midst"):
                    writer.transport.abort()
                    return
                frame = BytesIO(head + await reader.readexactly(size - 2))
                key, version, correlation, _ = RequestHeader_v1.SCHEMA.decode(frame)
                kind = _REQUESTS[key]
                if version != kind.API_VERSION:
                    raise ConnectionError(f"version {version} of request {key}")
                request = kind.decode(frame)
                if kind is SaslHandShakeRequest_v1:
                    signing = sign_in(request.mechanism) if request.mechanism in _MECHANISMS else None
                    if signing is not None:
                        next(signing)
                    answer: tuple[Any, ...] = (OK if signing is not None else BAD_SASL, list(_MECHANISMS))
                elif kind is SaslAuthenticateRequest_v0:
                    answer = _step(signing, request.sasl_auth_bytes)
                else:
                    answer = self._answer(request)
                if produces and self._rules.hang_up("after"):
                    writer.transport.abort()
                    return
                body = ResponseHeader_v0(correlation).encode() + kind.RESPONSE_TYPE(*answer).encode()
                writer.write(len(body).to_bytes(4) + body)
                await writer.drain()
                if kind is SaslAuthenticateRequest_v0 and answer[0] != OK:
                    return
        except (EOFError, ConnectionError):
            return
        finally:
            writer.close()

    def _answer(self, request: Any) -> tuple[Any, ...]:
        """Return the fields of the response."""
        rules = self._rules.read()
        if isinstance(request, ApiVersionRequest_v0):
            return OK, [(key, kind.API_VERSION, kind.API_VERSION) for key, kind in _REQUESTS.items()]
        if isinstance(request, InitProducerIdRequest_v0):
            error = rules.get("producer", OK)
            return 0, error, -1 if error else secrets.randbits(62), -1 if error else 0
        if isinstance(request, MetadataRequest_v5):
            nodes = [(0, "127.0.0.1", self._port, None)]
            asked = request.topics if request.topics is not None else [rules["topic"]] if "topic" in rules else []
            return 0, nodes, "stand-in, not Kafka", 0, [self._metadata(rules, topic) for topic in asked]
        written = []
        for topic, parts in request.topics:
            answers = []
            for number, data in parts:
                error, offset = self._write(rules, request.required_acks, topic, number, data)
                answers.append((number, error, offset, -1, -1 if error else 0))
            written.append((topic, answers))
        return written, 0

    def _metadata(self, rules: dict[str, Any], topic: str) -> tuple[Any, ...]:
        error = rules.get("hidden", OK) if topic == rules.get("topic") else UNKNOWN_TOPIC
        numbers = range(0 if error else rules["partitions"])
        return error, topic, False, [(OK, number, 0, [0], [0], []) for number in numbers]

    def _write(self, rules: dict[str, Any], acks: int, topic: str, number: int, data: bytes) -> tuple[int, int]:
        if topic != rules.get("topic") or not 0 <= number < rules["partitions"]:
            return UNKNOWN_TOPIC, -1
        if acks != -1:
            return INVALID_ACKS, -1
        if error := rules.get("write", OK):
            return error, -1
        path = self._rules.log(number)
        if path not in self._partitions:
            self._partitions[path] = Partition(path)
        return self._partitions[path].append(data, rules.get("largest", LARGEST))


def sign_in(mechanism: str) -> Generator[bytes, bytes, None]:
    """Receive client messages and yield the responses (RFC 4616, RFC 5802). Raises PermissionError."""
    said = yield b""
    if mechanism == "PLAIN":
        if said.decode().split("\0")[1:] != [USER, PASSWORD]:
            raise PermissionError
        yield b""
        return
    digest = _MECHANISMS[mechanism]
    assert digest is not None
    bare = said.decode().removeprefix("n,,")
    user, nonce = (part.partition("=")[2] for part in bare.split(","))
    nonce, salt, rounds = nonce + secrets.token_hex(8), os.urandom(16), 4096
    first = f"r={nonce},s={base64.b64encode(salt).decode()},i={rounds}"
    final, _, proof = (yield first.encode()).decode().partition(",p=")
    salted = hashlib.pbkdf2_hmac(digest, PASSWORD.encode(), salt, rounds)
    client = hmac.digest(salted, b"Client Key", digest)
    everything = f"{bare},{first},{final}".encode()
    signature = hmac.digest(hashlib.new(digest, client).digest(), everything, digest)
    right = bytes(a ^ b for a, b in zip(client, signature, strict=True))
    if user != USER or not final.endswith(f"r={nonce}") or not hmac.compare_digest(base64.b64decode(proof), right):
        raise PermissionError
    yield b"v=" + base64.b64encode(hmac.digest(hmac.digest(salted, b"Server Key", digest), everything, digest))


def _step(signing: Generator[bytes, bytes, None] | None, said: bytes) -> tuple[int, str | None, bytes]:
    try:
        if signing is not None:
            return OK, None, signing.send(said)
    except (PermissionError, StopIteration):
        pass
    return WRONG_PASSWORD, "user or password is wrong", b""


if __name__ == "__main__":
    asyncio.run(StandIn(int(sys.argv[1]), Path(sys.argv[2])).run())
