"""`timebell device ...`: push recipients of a server."""

from __future__ import annotations

import gzip
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from timebell.cli.groups import Group
from timebell.cli.options import output_option, yes_option
from timebell.cli.output import FAILED
from timebell.cli.schedule import server_client

if TYPE_CHECKING:
    from concurrent.futures import Future

    from timebell.cli.remote import ServerClient
    from timebell.features.campaigns.model.device_import import Column, Line

device = Group("Devices: the recipients of push messages.")
UPLOAD_SIZE = 5000  # records per request
PREVIEW_SIZE = 3
REPEATABLE = "Import the file again: known devices are only updated."
device_option = click.option("--token", metavar="TOKEN", help="The device with this token.")
user_option = click.option("--user", metavar="ID", help="All devices of a user.")


@device.command("import")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="CSV or JSON lines, or .gz.")
@click.option("--preview", is_flag=True, help="Show how the first lines are read, and import nothing.")
@output_option
def import_(file: Path, preview: bool, output: str | None) -> None:
    """Register devices from a CSV file with a header line, or from JSON lines; exit 1 if lines were refused.

    Safe to repeat. Refused lines and their reasons are written to FILE.rejected.ndjson.
    """
    from timebell.cli.output import Format, print_data, print_message, print_record
    from timebell.cli.progress import explain_interrupt, progress
    from timebell.clock import SystemClock

    remote = server_client(output)
    with _open_text(file) as source:
        importer = _Importer(remote, source, file)
        if preview:
            for fields in itertools.islice(importer.read_valid(), PREVIEW_SIZE):
                print_record(fields, remote.settings.output)
            return
        with (
            explain_interrupt(lambda: f"{importer.describe()}. {REPEATABLE}"),
            progress("Importing", file.stat().st_size, SystemClock()) as advance,
        ):
            importer.run(advance)
    counts = dict(importer.counts)
    rejected = str(importer.rejected_file) if counts["refused"] else None
    if remote.settings.output != Format.TABLE:
        print_record({**counts, "rejectedFile": rejected}, remote.settings.output)
    else:
        print_data(importer.describe())
    if rejected:
        print_message(f"Refused lines and their reasons are in {rejected}. Correct them and import the file again.")
        raise click.exceptions.Exit(FAILED)


@device.command()
@click.argument("id", required=False, metavar="[[ID]]", help="Device id.")
@device_option
@user_option
@output_option
def show(id: str | None, token: str | None, user: str | None, output: str | None) -> None:
    """Show a device by its id or token, or the devices of a user."""
    from timebell.cli.output import print_record

    remote = server_client(output)
    for found in _find(remote, id, token, user):
        print_record(found, remote.settings.output)


@device.command()
@click.argument("id", required=False, metavar="[[ID]]", help="Device id.")
@device_option
@user_option
@yes_option
@output_option
def delete(id: str | None, token: str | None, user: str | None, yes: bool, output: str | None) -> None:
    """Delete a device by its id or token, or the devices of a user."""
    from timebell.cli.inputs import confirm
    from timebell.cli.output import print_message

    remote = server_client(output)
    found = _find(remote, id, token, user)
    if not confirm(f"Delete {len(found)} devices?", yes=yes):
        raise click.exceptions.Exit(FAILED)
    for each in found:
        remote.request("DELETE", f"/devices/{each['id']}")
    print_message(f"Deleted {len(found)} devices.")


def _find(remote: ServerClient, id_: str | None, token: str | None, user: str | None) -> list[dict[str, Any]]:
    """Return the devices that a command names. Raises NotFound."""
    from timebell.errors import NotFound

    if (id_ is not None) + (token is not None) + (user is not None) != 1:
        raise click.UsageError("Specify an id, --token or --user.")
    if id_ is not None:
        return [remote.request("GET", f"/devices/{id_}")]
    found = list(remote.list_items("/devices", {"token": token, "userId": user}))
    if not found:
        raise NotFound(f"There is no device of {token or user!s:.60}.", code="DEVICE_NOT_FOUND")
    return found


class _Importer:
    """Reads a file, checks each record, and uploads the valid ones. `counts`: new, known and refused."""

    def __init__(self, remote: ServerClient, source: IO[bytes], file: Path) -> None:
        self.rejected_file = file.with_name(f"{file.name}.rejected.ndjson")
        self.counts = Counter(new=0, known=0, refused=0)
        self._remote = remote
        self._source = source
        self._is_csv = file.name.removesuffix(".gz").endswith(".csv")

    def describe(self) -> str:
        """Return the counts in words."""
        return f"{self.counts['new']:,} new, {self.counts['known']:,} known, {self.counts['refused']:,} refused"

    def run(self, advance: Any) -> None:
        """Upload all valid records, and write the others to `rejected_file`. Reads a batch while one is uploaded."""
        import orjson

        self.rejected_file.unlink(missing_ok=True)
        read = self.read_valid()
        lines = 0
        uploading: Future[dict[str, Any]] | None = None
        while batch := list(itertools.islice(read, UPLOAD_SIZE)):
            self._count(uploading)
            advance(_position(self._source), lines, self.counts["refused"])
            uploading = self._start_upload(b"\n".join(map(orjson.dumps, batch)))
            lines += len(batch)
        self._count(uploading)
        advance(_position(self._source), lines, self.counts["refused"])

    def _start_upload(self, content: bytes) -> Future[dict[str, Any]]:
        """Upload in a thread. It is a daemon, so that an interrupted command does not wait for the response."""
        from concurrent.futures import Future

        uploading: Future[dict[str, Any]] = Future()

        def upload() -> None:
            try:
                uploading.set_result(self._remote.upload("/devices/bulk", content, "application/x-ndjson"))
            except Exception as error:
                uploading.set_exception(error)

        threading.Thread(target=upload, daemon=True).start()
        return uploading

    def _count(self, uploading: Future[dict[str, Any]] | None) -> None:
        """Wait for an upload and count its records."""
        if uploading is None:
            return
        result = uploading.result()
        self.counts.update(new=result["progress"]["done"], known=result["progress"]["skipped"])
        for error in result["errors"]:
            self._reject(0, b"", error["detail"])

    def read_valid(self) -> Iterator[dict[str, Any]]:
        """Yield the JSON fields of valid records; the others are written to `rejected_file`."""
        from timebell.errors import TimebellError
        from timebell.features.campaigns.client.devices import parse_device
        from timebell.features.campaigns.model import device_import

        columns: list[Column] | None = None
        for number, text in self._records():
            if self._is_csv and columns is None:
                columns = device_import.parse_header(text)
                continue
            try:
                parsed = (
                    device_import.parse_json_record(text)
                    if columns is None
                    else device_import.parse_csv_record(text, columns)
                )
                parse_device(device_import.rename_fields(parsed))
            except TimebellError as error:
                self._reject(number, text, str(error))
            else:
                yield parsed

    def _records(self) -> Iterator[Line]:
        from timebell.features.campaigns.model.device_import import RecordReader

        reader = RecordReader()
        for number, line in enumerate(self._source, 1):
            text = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
            if text:
                yield from reader.read([(number, text)]) if self._is_csv else [(number, text)]
        yield from reader.finish()

    def _reject(self, number: int, text: bytes, reason: str) -> None:
        import orjson

        self.counts["refused"] += 1
        with self.rejected_file.open("ab") as rejected:
            line = {"line": number, "reason": reason, "text": text.decode("utf-8", "replace")}
            rejected.write(orjson.dumps(line) + b"\n")


def _open_text(file: Path) -> IO[bytes]:
    """Open a file, decompressed if its name ends in .gz."""
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")  # type: ignore[return-value]


def _position(source: IO[bytes]) -> int:
    """Return how much of the file was read, in bytes of the file itself."""
    return source.fileobj.tell() if isinstance(source, gzip.GzipFile) and source.fileobj else source.tell()
