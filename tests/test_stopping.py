"""Stop strings in a text that grows byte by byte."""

from __future__ import annotations

from rlx_jax.generate.stopping import PART, cut, settled, stopped_at


def decode(ids: list[int]) -> str:
    """Bytes as text; those of a broken character as its sign."""
    return bytes(ids).decode("utf-8", "replace")


def test_half_of_a_character_is_no_stop_string() -> None:
    """Only once it can no longer become whole."""
    ids = list("né€😀".encode())
    for n in range(1, len(ids) + 1):
        assert not stopped_at(decode, ids[:n], 1, (PART,))
        assert "né€😀".startswith(settled(decode(ids[:n]), (PART,)))
    long = list("😀".encode()) * 80  # the last tokens begin within a character
    assert not stopped_at(decode, long, 1, (PART, "x"))
    broken = [*b"ab\xf0\x9f", *b"c"]
    assert stopped_at(decode, broken, 1, (PART,)) and not stopped_at(decode, broken[:-1], 1, (PART,))
    assert settled(decode(broken), (PART,)) == cut(decode(broken), (PART,)) == "ab"


def test_what_may_become_a_stop_string_is_held() -> None:
    """And what stands before one is settled."""
    assert settled("one two", ("wot", "oh")) == "one t"
    assert settled("one two", ("ne t", "x")) == "o"
    assert stopped_at(decode, [*b"one two"], 2, ("two",)) and not stopped_at(decode, [*b"one two"], 2, ())
