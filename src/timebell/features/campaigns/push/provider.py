"""The push provider interface: an adapter that sends a batch of messages and reports the result of each.

A new provider is a class with `name`, `ready`, `send` and `close`;
`timebell.features.campaigns.testing` tests whether it conforms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from timebell.features.campaigns.push.message import Message


class SendOutcome(StrEnum):
    """The outcome of sending a message."""

    ACCEPTED = "accepted"
    """The provider accepted it and assigned an id."""
    REFUSED = "refused"
    """It will never be delivered; do not retry."""
    RETRY = "retry"
    """It was not delivered; retry later."""
    UNKNOWN = "unknown"
    """It may have been delivered: the response was lost, or was an error that leaves the outcome open."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """The result of one message: an `id` if accepted, otherwise a `code` (UPPER_SNAKE) and an `error`.

    `retry_after`: seconds to wait (RETRY). `token_is_dead`: remove the token (REFUSED). `uncounted`: the message only
    waited for quota or in the queue, so the retry uses no attempt of the budget (RETRY). `blocks_account`: the provider
    refuses every message of this account until a person changes its configuration.
    """

    outcome: SendOutcome
    id: str | None = None
    code: str | None = None
    error: str | None = None
    retry_after: float | None = None
    token_is_dead: bool = False
    uncounted: bool = False
    blocks_account: bool = False


OnResult = Callable[[int, PushResult], None]
"""Called once per message with its index in the batch; possibly at any time, so it must only record the result."""


class Provider(Protocol):
    """A provider adapter. One instance serves many concurrent batches, on one event loop."""

    name: str

    async def ready(self) -> PushResult | None:
        """Prepare what the first message would wait for, such as a token or a connection.

        Returns the result of every message if the provider refuses the account, otherwise None. Other failures are
        ignored.
        """
        ...

    def divide_quota(self, nodes: int) -> None:
        """Use an equal part of the quota from now on, because this number of nodes shares it."""
        ...

    async def send(self, messages: Sequence[Message], on_result: OnResult) -> None:
        """Send all messages concurrently, each once, and return when all results are reported.

        Failures are results, not exceptions. On cancellation, messages in flight are reported as UNKNOWN unless their
        response arrives shortly after; messages without a result were never sent.
        """
        ...

    async def close(self) -> None:
        """Release all resources; no batch is in progress."""
        ...
