"""What a provider of push messages is: an adapter that sends many at once, and says of each what became of it.

A new one is a class with `name`, `ready`, `send` and `close`;
`timebell.testing.push_providers` tells whether it keeps to this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from timebell.targets.push.message import Message


class Fate(StrEnum):
    """What became of a message."""

    ACCEPTED = "accepted"
    """The provider has it, under an id."""
    REFUSED = "refused"
    """It will never be delivered, however often it is sent."""
    AGAIN = "again"
    """It was not delivered, and may be later."""
    UNKNOWN = "unknown"
    """It may have been delivered, or not: the answer was lost, or was a fault after which nobody knows."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one message. `id` of those accepted; `code` (UPPER_SNAKE) and `error` of the others.

    `after`: seconds to wait, of AGAIN. `remove`: the token is dead, of REFUSED. `costs_nothing`: of AGAIN, that it
    waited for its turn or for quota, so that no try is used up.
    """

    fate: Fate
    id: str | None = None
    code: str | None = None
    error: str | None = None
    after: float | None = None
    remove: bool = False
    costs_nothing: bool = False


Told = Callable[[int, Answer], None]
"""Called with a message's place in the batch, once, when it is answered; at any time, so it only takes notes."""


class Provider(Protocol):
    """An adapter. One instance serves many batches at once, on one event loop."""

    name: str

    async def ready(self) -> None:
        """Do ahead what the first message would wait for, such as a token or a connection. A failure is no matter."""
        ...

    async def send(self, messages: Sequence[Message], told: Told) -> None:
        """Try each message once, all at once, and return when every one is answered.

        No failure raises: it is an answer. When cancelled, those under way are told as UNKNOWN unless their answer
        comes at once; what is never told was never sent.
        """
        ...

    async def close(self) -> None:
        """Let go of what is held; no batch is under way."""
        ...
