"""Schedules of widths, as a command line names them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphspec.verify_width import WidthSchedule

LATER = st.dictionaries(st.integers(2, 40), st.integers(0, 8), max_size=6)


@given(first=st.integers(0, 8), later=LATER)
def test_each_width_holds_from_its_batch_size_to_the_next(first: int, later: dict[int, int]) -> None:
    widths = {1: first, **later}
    schedule = WidthSchedule.parse(",".join(f"{size}:{width}" for size, width in widths.items()))
    in_use = first
    for size in range(1, 50):
        in_use = widths.get(size, in_use)
        assert schedule.at(size) == in_use
    assert schedule.widths == tuple(sorted(set(widths.values())))
    assert WidthSchedule.parse(str(schedule)) == schedule


def test_it_is_written_in_order() -> None:
    assert str(WidthSchedule.parse(" 16:0, 1 : 4,4:2 ")) == "1:4,4:2,16:0"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1:4,8", "'1:4,8' is not a schedule of widths by batch size, such as 1:4,8:2,16:0"),
        ("1:4:2", "is not a schedule"),
        ("1:-4", "is not a schedule"),
        ("1:٣", "is not a schedule"),
        ("", "is not a schedule"),
        ("2:4,8:0", "the first range starts at batch size 2; it must start at 1"),
        ("0:4,1:2", "batch sizes 0 to 0 are not a range"),
        ("1:4,8:2,8:0", "batch sizes 8 to 8 and 8 to 8 overlap"),
    ],
)
def test_what_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WidthSchedule.parse(text)
