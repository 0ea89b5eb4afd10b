"""The map of prefixes against a plain dictionary: the longest prefix, the budget, and what is evicted first."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_jax.generate.sorted_prefixes import PrefixMap, shared_prefixes

ids = st.lists(st.integers(0, 2), max_size=6).map(tuple)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), ids, st.integers(0, 6), st.booleans()),
        st.tuples(st.sampled_from(["longest", "remove"]), ids, st.just(0), st.just(False)),
    ),
    max_size=40,
)


@settings(max_examples=40)
@given(steps, st.integers(0, 12))
def test_values_equal_a_dictionary(steps: list[tuple[str, tuple[int, ...], int, bool]], budget: int) -> None:
    """A dictionary from sequences to (value, bytes, pinned), the least recently used first."""
    stored: PrefixMap[int] = PrefixMap(budget)
    entries: dict[tuple[int, ...], tuple[int, int, bool]] = {}
    for number, (step, key, nbytes, pinned) in enumerate(steps):
        if step == "put":
            others = {k: entry for k, entry in entries.items() if k != key}
            want: list[int] | None = None
            if nbytes + sum(size for _, size, is_pinned in others.values() if is_pinned) <= budget:
                want = [entries[key][0]] if key in entries else []
                for k in [k for k, (_, _, is_pinned) in others.items() if not is_pinned]:
                    if nbytes + sum(size for _, size, _ in others.values()) <= budget:
                        break
                    want.append(others.pop(k)[0])
                entries = {**others, key: (number, nbytes, pinned)}
            assert stored.put(key, number, nbytes, pinned) == want
        elif step == "longest":
            best = max((k for k in entries if key[: len(k)] == k), key=len, default=None)
            if best is not None:
                entries[best] = entries.pop(best)
            assert stored.longest(key) == (None if best is None else entries[best][0])
        else:
            if key in entries:
                assert stored.remove(key) == entries.pop(key)[0]
        assert [*stored.entries.items()] == [*entries.items()]
        assert stored.nbytes == sum(size for _, size, _ in entries.values()) <= budget
        assert stored.pinned_bytes == sum(size for _, size, is_pinned in entries.values() if is_pinned)


@given(st.lists(ids, max_size=12), st.integers(0, 4))
def test_shared_prefixes_equal_all_pairs(rows: list[tuple[int, ...]], min_len: int) -> None:
    """The longest common prefix of every two rows, and the rows that begin with it."""
    lengths = {(i, j): naive_length(rows[i], rows[j]) for i in range(len(rows)) for j in range(i)}
    want = {rows[i][:n] for (i, _), n in lengths.items() if n >= max(min_len, 1)}
    got = {rows[numbers[0]][:length]: sorted(numbers) for length, numbers in shared_prefixes(rows, min_len)}
    assert got == {prefix: [i for i, row in enumerate(rows) if row[: len(prefix)] == prefix] for prefix in want}


def naive_length(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
