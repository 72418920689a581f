"""Deadlines and budgets as people write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from chorus_batch.jobs.errors import UsageError
from chorus_batch.jobs.limits import Spent, parse_age, parse_budget, parse_deadline

NOW = datetime(2026, 4, 12, 22, 30, tzinfo=timezone(timedelta(hours=2)))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("8h", NOW + timedelta(hours=8)),
        ("2h30m", NOW + timedelta(minutes=150)),
        ("1d 2h", NOW + timedelta(hours=26)),
        ("90min", NOW + timedelta(minutes=90)),
        ("0.5h", NOW + timedelta(minutes=30)),
        ("45s", NOW + timedelta(seconds=45)),
        ("06:00", datetime(2026, 4, 13, 6, 0, tzinfo=NOW.tzinfo)),
        ("23:00", datetime(2026, 4, 12, 23, 0, tzinfo=NOW.tzinfo)),
        ("2026-04-13T06:00", datetime(2026, 4, 13, 6, 0, tzinfo=NOW.tzinfo)),
        ("2026-04-13 06:00+00:00", datetime(2026, 4, 13, 6, 0, tzinfo=UTC)),
        ("2026-04-13T06:00Z", datetime(2026, 4, 13, 6, 0, tzinfo=UTC)),
    ],
)
def test_deadlines(given: str, expected: datetime) -> None:
    assert parse_deadline(given, NOW) == expected


def test_ages() -> None:
    assert parse_age("7d", NOW) == NOW - timedelta(days=7)
    assert parse_age("1d 2h", NOW) == NOW - timedelta(hours=26)
    assert parse_age("0s", NOW) == NOW


@pytest.mark.parametrize("given", ["", "a week", "7", "-1d", "06:00", "9999999d", "9" * 400 + "d"])
def test_no_ages(given: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_age(given, NOW)
    assert given in str(caught.value) and caught.value.hint


@pytest.mark.parametrize(
    "given", ["", "soon", "8", "-1h", "8h later", "2026-13-01", "2026-04-12T22:00", "0s", "h", "9" * 400 + "d"]
)
def test_no_deadlines(given: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_deadline(given, NOW)
    assert given in str(caught.value) and caught.value.hint


def test_budgets() -> None:
    assert parse_budget("2.5") == 9000 and parse_budget("none") is None
    for given in ("0", "-1", "nan", "inf", "much", ""):
        with pytest.raises(UsageError):
            parse_budget(given)


def test_a_budget_is_looked_at_again_before_it_can_be_spent() -> None:
    assert Spent(40.0, running=3).until(100.0, workers=5) == 60 / 10
    assert Spent(40.0, running=3).until(100.0, workers=0) == 60 / 6
    assert Spent(0.0, running=0).until(100.0, workers=0) == 50
    assert Spent(140.0, running=3).until(100.0, workers=5) == 0
