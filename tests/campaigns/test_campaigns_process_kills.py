"""Campaigns whose sending process is killed repeatedly."""

from __future__ import annotations

import pytest

from benchmarks import campaigns


@pytest.mark.soak
def test_five_process_kills_cause_no_duplicate_message() -> None:
    assert campaigns.main(["--devices", "200000", "--kills", "5", "--stores", "sqlite"]) == 0
