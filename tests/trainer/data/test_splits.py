# SPDX-License-Identifier: MIT
"""Days and shares of rows: read, written short, and apart in training and testing."""

import datetime

import pytest

from trainer.data.files import LogFile, keep_rows
from trainer.data.splits import check_overlap, describe_days, parse_days


def calendar(first: str, count: int) -> list[str]:
    start = datetime.date.fromisoformat(first)
    return [(start + datetime.timedelta(days=i)).isoformat() for i in range(count)]


def log(*days: str, root: str = "logs", rows: tuple[int, ...] = (10, 5)) -> tuple[LogFile, ...]:
    return tuple(
        LogFile(path=f"{root}/{day}.parquet", day=day, row_group_rows=rows) for day in days
    )


def test_a_day_that_the_calendar_does_not_have_is_refused():
    for text in ("2026-02-30", "2026-13-01:2026-13-02", "2026-1-1"):
        with pytest.raises(ValueError, match="days: expected FIRST:LAST or DAY"):
            parse_days(text)


@pytest.mark.parametrize(
    ("days", "expected"),
    [
        ([], ""),
        (["2026-01-05"], "2026-01-05"),
        (calendar("2025-12-30", 400), "2025-12-30 to 2027-02-02"),
        ([*calendar("2026-02-27", 3), "2026-03-09"], "2026-02-27 to 2026-03-01, 2026-03-09"),
        (["b.parquet", "2026-01-01", "b.parquet"], "2026-01-01, b.parquet"),
        (
            calendar("2026-01-01", 60)[::2],
            "2026-01-01, 2026-01-03, 2026-01-05, 24 days more, 2026-02-24, 2026-02-26, 2026-02-28",
        ),
    ],
)
def test_days_are_written_as_ranges(days, expected):
    assert describe_days(reversed(days)) == expected


def test_test_rows_that_are_training_rows_are_counted_with_their_days():
    days = calendar("2026-01-01", 6)
    check_overlap(log(*days[:3]), log(*days[3:]))
    with pytest.raises(ValueError, match=r"30 of the 60 test rows are .*2026-01-03 to 2026-01-04"):
        check_overlap(log(*days[:4]), log(*days[2:]))
    with pytest.raises(ValueError, match=r"pass --data\.allow-overlap"):
        check_overlap(log(""), log(""))


def test_rows_of_one_file_may_be_shared_out_and_another_folder_is_another_log():
    whole = log("2026-01-01", rows=(10, 10))
    check_overlap(keep_rows(whole, (0, 0.75)), keep_rows(whole, (0.75, 1)))
    with pytest.raises(ValueError, match="5 of the 10 test rows"):
        check_overlap(keep_rows(whole, (0, 0.75)), keep_rows(whole, (0.5, 1)))
    check_overlap(whole, log("2026-01-01", root="elsewhere"))


def test_a_link_to_the_training_file_is_the_training_file(tmp_path):
    (tmp_path / "day.parquet").touch()
    (tmp_path / "link.parquet").symlink_to(tmp_path / "day.parquet")
    one, two = (
        [LogFile(path=str(tmp_path / name), row_group_rows=(3,))]
        for name in ("day.parquet", "link.parquet")
    )
    with pytest.raises(ValueError, match="3 of the 3 test rows"):
        check_overlap(one, two)
