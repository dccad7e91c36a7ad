"""The program of a worker process: it runs the handlers of one node, one call at a time.

It reads calls from its connection, and writes back the result or exception, and the progress and log records in
between. When the connection closes, because the node has ended in whatever way, it ends with all processes that its
handler has started.
"""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from importlib import import_module
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NoReturn

from timebell.errors import TimebellError
from timebell.targets.base import TransactionBlock
from timebell.targets.exceptions import failed_outcome
from timebell.targets.handler import call_sync


def serve(descriptor: int) -> NoReturn:
    """Run the calls that arrive at a connection, until it closes."""
    # The node decides when to stop: a service manager may signal all processes, although the node still drains. Not
    # SIG_IGN, which programs started by handlers would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    worker = _Worker(Connection(descriptor))
    Thread(target=worker.read, daemon=True).start()
    modules, log_levels = worker.receive()
    for name, level in log_levels.items():
        logging.getLogger(name).setLevel(level)
    logging.getLogger().addHandler(_LogForwarder(worker))
    for module in modules:
        with suppress(Exception):  # the call of its function reports the error
            import_module(module)
    worker.send("ready")
    while True:
        worker.run_next()


class _Worker:
    """The connection to the node."""

    should_stop = False
    """The node ends the process instead."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._received: SimpleQueue[bytes] = SimpleQueue()
        self._write_lock = Lock()

    def read(self) -> NoReturn:
        """Queue what arrives. In a thread, so that the end of the node is noticed while a handler runs."""
        while True:
            try:
                self._received.put(self._connection.recv_bytes())
            except (EOFError, OSError):
                os.killpg(0, signal.SIGKILL)

    def receive(self) -> Any:
        return pickle.loads(self._received.get())  # noqa: S301 - written by the node

    def send(self, *message: Any) -> None:
        data = pickle.dumps(message)
        with self._write_lock:  # handlers may report progress and log in several threads
            self._connection.send_bytes(data)

    def run_next(self) -> None:
        """Run the next call, and send its result or exception."""
        try:
            path, event = self.receive()
            event._attempt = self
            returned = call_sync(path.resolve(), event, None)
            if inspect.isawaitable(returned):
                raise TypeError(f"{path.name} returned an awaitable, which a worker process does not run.")
        except BaseException as error:  # sys.exit() in a handler ends only the call
            failure = failed_outcome(error, retryable=True)
            self.send("raised", _portable(error), (failure.code, failure.error, failure.traceback))
            return
        try:
            self.send("returned", returned)
        except Exception:  # it cannot be pickled, so it cannot be stored either
            self.send("unstorable", type(returned).__name__)

    def report_progress(self, fraction: float | None, text: str | None) -> None:
        self.send("progress", fraction, text)

    def transaction(self, result: Callable[[], Any]) -> TransactionBlock:
        raise _no_transaction()

    def join_transaction(
        self, result: Callable[[], Any], connection: Any, atomic: AbstractContextManager[Any]
    ) -> AbstractContextManager[None]:
        raise _no_transaction()


class _LogForwarder(QueueHandler):
    """Sends log records to the node, which handles them like its own."""

    def __init__(self, worker: _Worker) -> None:
        super().__init__(worker)  # type: ignore[arg-type]
        self._worker = worker

    def enqueue(self, record: logging.LogRecord) -> None:
        self._worker.send("log", record)


def _portable(error: BaseException) -> BaseException | Callable[[], BaseException]:
    """Return an exception that can be pickled, or a function that rebuilds it, if necessary as a base class."""
    if _survives(error):
        return error
    args = error.args if _survives(error.args) else (str(error),)
    state = {name: value for name, value in vars(error).items() if _survives(value)}
    for kind in filter(_survives, type(error).__mro__):
        rebuild = partial(_rebuild, kind, args, state)
        with suppress(Exception):
            rebuild()
            return rebuild
    return RuntimeError(str(error))


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Create an exception without its `__init__`, whose parameters may differ from its `args`."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def _survives(value: object) -> bool:
    """True if a value can be pickled and restored."""
    try:
        pickle.loads(pickle.dumps(value))  # noqa: S301 - written in this line
    except Exception:
        return False
    return True


def _no_transaction() -> TimebellError:
    return TimebellError(
        "event.transaction() does not work in a worker process, which has no connection to Timebell's database.",
        code="TRANSACTION_IN_PROCESS", fix='Leave out executor="process", or write with a connection of your own.',
    )  # fmt: skip
