"""What a person's text may hold, and how a text that may hold anything is shown."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from bucketplan_core.fields import escaped, has_controls

REORDERING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
anything = st.text(
    st.characters(exclude_categories=()) | st.sampled_from("\x1b\x07\x9b\x7f\r\n\t\u2028\u202e\u2066\u200f")
)


def is_obeyed(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") or unicodedata.bidirectional(character) in REORDERING


@given(anything)
def test_a_name_holds_nothing_that_a_terminal_obeys_and_no_end_of_line(text):
    refused = any(is_obeyed(c) or unicodedata.category(c) in ("Zl", "Zp") for c in text)
    assert has_controls(text, lines=False) == refused
    assert refused or len(text.splitlines()) <= 1


@given(anything)
def test_a_text_of_several_lines_may_have_ends_of_lines_and_tabs_beside(text):
    left = text.replace("\r\n", "").translate(dict.fromkeys(map(ord, "\n\t")))
    assert has_controls(text, lines=True) == any(map(is_obeyed, left))


def test_people_write_in_their_own_script():
    for text in ("שלום", "مرحبا\u200f", "🚂👩\u200d🔧", "na\u00a0me", "e\u0301"):
        assert not has_controls(text, lines=False)


@given(anything)
def test_what_is_escaped_is_printable_and_what_is_printable_stays(text):
    assert escaped(text).isprintable()
    assert escaped(text, lines=True).replace("\n", "").isprintable()
    assert escaped(text, lines=True).count("\n") == text.count("\n")
    assert escaped(escaped(text)) == escaped(text)
    assert not text.isprintable() or escaped(text) == text
    assert escaped("\x1b[2J\r") == r"\x1b[2J\r"
