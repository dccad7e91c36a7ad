"""The body of `POST /devices/bulk`: batches of lines, parsed and stored while the next ones arrive."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from timebell.api.bulk import BODY_IDLE_TIMEOUT_SECONDS, read_batches
from timebell.api.route import Context
from timebell.client.job_lines import Line
from timebell.errors import InvalidInput, TimebellError
from timebell.features.campaigns.client.devices import parse_device
from timebell.features.campaigns.model.device_import import (
    Column,
    RecordReader,
    parse_csv_record,
    parse_header,
    parse_json_record,
    rename_fields,
)
from timebell.features.campaigns.store import devices as rows
from timebell.model.operation import Operation, OperationState, StepResult
from timebell.store.cluster import operations
from timebell.store.transaction import Transaction

BATCH_SIZE = 1000  # lines per transaction
MAX_UNPACKED_BYTES = 1_000_000
"""Decompressed at once from a compressed body."""
GZIP_WBITS = 16 + zlib.MAX_WBITS  # of zlib, for data with the header of gzip

ParsedDevice = tuple[str, dict[str, Any]]
"""A token, and the fields of a device by Python name."""


class DeviceImport:
    """An import operation. A batch is parsed in a thread while the database stores the one before."""

    def __init__(self, ctx: Context, operation: Operation, *, is_csv: bool) -> None:
        self._ctx = ctx
        self._operation = operation
        self._is_csv = is_csv
        self._reader = RecordReader()
        self._columns: list[Column] | None = None
        self._stored_line = 0
        self._writing: asyncio.Task[bool] | None = None

    async def run(self, request: Request) -> tuple[OperationState, str | None]:
        """Import all lines; return the final state of the operation and the reason of a failure."""
        try:
            is_running = await self._import_lines(request) and await self._is_written()
        except InvalidInput as error:  # in the header line, or the compression
            return OperationState.FAILED, str(error)
        except (ClientDisconnect, TimeoutError) as error:
            await self._is_written()
            disconnected = isinstance(error, ClientDisconnect)
            why = "The client disconnected" if disconnected else f"No data arrived for {BODY_IDLE_TIMEOUT_SECONDS:g} s"
            return OperationState.FAILED, f"{why}; all lines up to line {self._stored_line} are imported."
        finally:
            if self._writing is not None:
                await asyncio.wait([self._writing])
        return OperationState.COMPLETED if is_running else OperationState.CANCELLED, None

    async def _import_lines(self, request: Request) -> bool:
        """Return whether the operation is still running. Raises InvalidInput, ClientDisconnect, TimeoutError."""
        async for lines in read_batches(request, self._ctx, BATCH_SIZE):
            records = list(self._reader.read(lines)) if self._is_csv else lines
            if self._is_csv and self._columns is None and records:
                (_, header), *records = records
                self._columns = parse_header(header)
            if not await self._import_batch(records):
                return False
        if self._is_csv and self._columns is None:
            raise InvalidInput("The file has no header line.", code="INVALID_DEVICE", fix="Start it with: token,userId")
        return await self._import_batch(list(self._reader.finish()))

    async def _import_batch(self, records: list[Line]) -> bool:
        """Start to store a batch, and return whether the operation is still running."""
        devices, errors = await asyncio.to_thread(_parse_records, records, self._columns)
        if not await self._is_written():
            return False
        last_line = records[-1][0] if records else self._stored_line
        self._writing = asyncio.create_task(self._write(devices, errors, last_line))
        return True

    async def _is_written(self) -> bool:
        """Wait until the previous batch is stored; return whether the operation is still running."""
        return self._writing is None or await self._writing

    async def _write(
        self, devices: Sequence[ParsedDevice], errors: Sequence[dict[str, Any]], last_line: int
    ) -> bool:  # fmt: skip
        is_running: bool = await self._ctx.run(
            _insert_batch, self._operation.id, self._ctx.tenant_id, devices, errors, str(last_line),
            self._ctx.app.clock.now(),
        )  # fmt: skip
        self._stored_line = last_line
        return is_running


def parse_device_fields(fields: dict[str, Any]) -> ParsedDevice:
    """Parse the JSON fields of a device. Raises InvalidInput."""
    return parse_device(rename_fields(fields))


def _parse_records(
    records: list[Line], columns: list[Column] | None
) -> tuple[list[ParsedDevice], list[dict[str, Any]]]:  # fmt: skip
    """Return the parsed devices and the errors of invalid records."""
    devices, errors = [], []
    for number, text in records:
        try:
            fields = parse_json_record(text) if columns is None else parse_csv_record(text, columns)
            devices.append(parse_device_fields(fields))
        except TimebellError as error:
            errors.append({"line": number, "code": error.code, "detail": str(error)[:500]})
    return devices, errors


class GunzippedRequest(Request):
    """A request whose body is decompressed while it arrives. Raises InvalidInput (INVALID_BODY)."""

    async def stream(self) -> AsyncGenerator[bytes, None]:
        unpacker = zlib.decompressobj(GZIP_WBITS)
        async for packed in super().stream():
            while packed:
                if unpacker.eof:  # further data are a further member (RFC 1952, section 2.2), or padding with zeros
                    if not (packed := packed.lstrip(b"\0")):
                        break
                    unpacker = zlib.decompressobj(GZIP_WBITS)
                try:
                    yield unpacker.decompress(packed, MAX_UNPACKED_BYTES)
                except zlib.error as error:
                    raise _invalid_gzip(str(error)) from None
                packed = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
        if not unpacker.eof:
            raise _invalid_gzip("it ends too early")


def _invalid_gzip(reason: str) -> InvalidInput:
    return InvalidInput(
        f"The body is not valid gzip: {reason}.", code="INVALID_BODY", fix="Compress the whole file with gzip."
    )


def _insert_batch(
    tx: Transaction, operation_id: str, tenant_id: str, devices: Sequence[ParsedDevice],
    errors: Sequence[dict[str, Any]], cursor: str, now: datetime,
) -> bool:  # fmt: skip
    """Insert one batch and record its progress; return False if the operation is not running.

    New devices count as `done`, known devices as `skipped`.
    """
    operation = operations.lock_running(tx, operation_id)
    if operation is None:
        return False
    new = rows.register_devices(tx, tenant_id, devices, now) if devices else 0
    operations.record_progress(
        tx, operation, StepResult(new, len(errors), len(devices) - new, cursor, tuple(errors)), now
    )
    return True
