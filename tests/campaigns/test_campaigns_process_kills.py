"""Campaigns whose sending process is killed repeatedly, checked phone by phone against what the phones received."""

from __future__ import annotations

import pytest

from benchmarks import campaigns


@pytest.mark.soak
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_five_process_kills_break_no_promise(store: str) -> None:
    assert campaigns.main(["--devices", "200000", "--import", "--kills", "5", "--stores", store]) == 0
