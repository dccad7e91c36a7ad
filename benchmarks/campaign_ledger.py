"""Compare what the phones received with what the sender reports, phone by phone. Uses only the standard library.

`python benchmarks/campaign_ledger.py PEOPLE.csv RECEIVED.json REPORT.csv --requests N [--tier N]` prints the counts as
JSON, and exits with 1 if a promise was broken. PEOPLE are the registered devices, RECEIVED the ids of the messages that
each token received and `--requests` the number of all messages posted, as the receiving side recorded them, and REPORT
is the exported result of the campaign.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from pathlib import Path

GONE = "gone"
"""Tokens that begin with this belong to phones without the app: the receiver refuses their messages."""
BROKEN_PROMISES = ("missing", "strangers", "twice", "unlisted", "listed_twice", "accepted_not_received",
                   "not_accepted_but_received", "gone_not_refused", "in_flight_not_unknown")  # fmt: skip


def compare(people: Path, received: Path, report: Path, requests: int, tier: str | None = None) -> Counter[str]:
    """Count recipients, and broken promises (BROKEN_PROMISES). `tier` limits the audience; None: everyone.

    A recipient whose result is reported as unknown may have the message or not, but never twice. `in_flight` are the
    posted messages without a reported result: those whose sender was killed before it had stored the result.
    """
    counts: Counter[str] = Counter()
    messages = {token: len(ids) for token, ids in json.loads(received.read_text()).items()}
    states: dict[str, str] = {}
    reported_gone = 0
    with report.open(newline="") as lines:
        for row in csv.DictReader(lines):
            counts[f"reported_{row['state']}"] += 1
            if not row["userId"]:  # the device was deleted, because its token is invalid
                reported_gone += row["code"] == "UNREGISTERED" and row["state"] == "refused"
                counts["unlisted"] += row["code"] != "UNREGISTERED"
            else:
                counts["listed_twice"] += row["userId"] in states
                states[row["userId"]] = row["state"]
    gone = 0
    with people.open(newline="") as lines:
        for row in csv.DictReader(lines):
            if tier is not None and row["tier"] != tier:
                counts["left_out"] += 1
                counts["strangers"] += row["token"] in messages
                continue
            counts["recipients"] += 1
            arrived, state = messages.get(row["token"], 0), states.get(row["userId"])
            counts["twice"] += arrived > 1
            if row["token"].startswith(GONE):
                gone += 1
                counts["gone_unknown"] += state == "unknown"
                counts["strangers"] += arrived > 0
                continue
            counts["received"] += arrived > 0
            counts["unlisted"] += state is None
            counts["missing"] += not arrived and state != "unknown"
            counts["unknown_received"] += state == "unknown" and arrived > 0
            counts["accepted_not_received"] += state == "accepted" and not arrived
            counts["not_accepted_but_received"] += arrived > 0 and state not in ("accepted", "unknown")
    counts["strangers"] += len(messages) - counts["received"] - counts["strangers"]
    counts["gone"] = gone
    counts["in_flight"] = requests - counts["reported_accepted"] - counts["reported_refused"]
    counts["in_flight_not_unknown"] = max(0, counts["in_flight"] - counts["reported_unknown"])
    counts["gone_not_refused"] = abs(gone - reported_gone - counts["gone_unknown"])
    return counts


def main() -> int:
    """Return the exit status: 0 if no promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("people", "received", "report"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--tier")
    args = parser.parse_args()
    counts = compare(args.people, args.received, args.report, args.requests, args.tier)
    print(json.dumps(counts | {name: counts[name] for name in BROKEN_PROMISES}))
    return 1 if any(counts[name] for name in BROKEN_PROMISES) else 0


if __name__ == "__main__":
    sys.exit(main())
