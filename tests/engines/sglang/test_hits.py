# SPDX-License-Identifier: Apache-2.0
"""Where hits may end, against the definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvoffload.engines.sglang.hits import restorable_pages


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 14), st.none() | st.integers(1, 5))
def test_a_hit_ends_where_all_that_it_needs_is_stored(
    present: list[bool], num_pages: int, trailing: int | None
) -> None:
    def is_stored(page: int) -> bool:
        return page < len(present) and present[page]

    expected = {
        end
        for end in range(1, num_pages + 1)
        if all(is_stored(page) for page in range(0 if trailing is None else max(0, end - trailing), end))
    }
    assert restorable_pages(present, num_pages, trailing) == expected
