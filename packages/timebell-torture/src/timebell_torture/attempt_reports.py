"""Reports of handlers and remote workers to the receiver: the start of an attempt, then its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any


def encode_start(facts: Mapping[str, Any]) -> bytes:
    """Return the line that reports a start. The receiver replies with its decision: `plan` and `seconds`."""
    return json.dumps(facts).encode() + b"\n"


async def report_start(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Report a start, wait for as long as the receiver decides, and return the decision."""
    writer.write(encode_start(facts))
    decision: dict[str, Any] = json.loads(await reader.readline())
    await asyncio.sleep(decision["seconds"])
    return decision


async def report_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Report the end, and wait until it is recorded."""
    writer.write(b"{}\n")
    await reader.readline()
