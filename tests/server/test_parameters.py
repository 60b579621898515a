"""Cursors of the list of plans: read back as they were written, and nothing else is one."""

from hypothesis import given
from hypothesis import strategies as st

from bucketplan_core.wire import MAX_INT
from bucketplan_server.http.parameters import read_cursor, write_cursor

SIGNATURES = st.text("0123456789abcdef", min_size=64, max_size=64)


@given(st.integers(0, MAX_INT), SIGNATURES)
def test_a_cursor_is_read_as_it_was_written(created_ns: int, signature: str) -> None:
    assert read_cursor(write_cursor(created_ns, signature)) == (created_ns, signature)


@given(st.integers(MAX_INT + 1, 10**19), SIGNATURES)
def test_no_time_that_the_store_cannot_hold_is_read(created_ns: int, signature: str) -> None:
    assert read_cursor(write_cursor(created_ns, signature)) is None


@given(st.text() | st.from_regex(r"\A[0-9]{0,25}-?[0-9a-fA-F]{60,70}\n?\Z"))
def test_any_text_is_a_cursor_or_none(text: str) -> None:
    found = read_cursor(text)
    if found is not None:
        created_ns, signature = found
        digits, _, rest = text.partition("-")
        assert (int(digits), rest) == (created_ns, signature)
        assert created_ns <= MAX_INT
        assert len(signature) == 64
