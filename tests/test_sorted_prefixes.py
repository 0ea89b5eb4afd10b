"""The cache of prefixes against a plain dictionary: the longest prefix, the budget, and what is evicted first."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_jax.generate.prefix_cache import Prefix, PrefixCache
from rlx_jax.generate.sorted_prefixes import shared_prefixes

ids = st.lists(st.integers(0, 2), max_size=6).map(tuple)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), ids, st.integers(0, 6), st.booleans()),
        st.tuples(st.sampled_from(["longest", "remove"]), ids, st.just(0), st.just(False)),
    ),
    max_size=40,
)


@settings(max_examples=40)
@given(steps, st.integers(0, 12))
def test_values_equal_a_dictionary(steps: list[tuple[str, tuple[int, ...], int, bool]], budget: int) -> None:
    """A dictionary from sequences to prefixes, the least recently used first; evicted ones have no state."""
    cache = PrefixCache(budget)
    entries: dict[tuple[int, ...], Prefix] = {}
    for step, key, nbytes, named in steps:
        if step == "store":
            prefix = Prefix(key, nbytes, 64, cache=cache if named else None)
            old, others = entries.get(key), [entry for k, entry in entries.items() if k != key]
            if old is not None and old.is_named:
                continue  # `prefix` returns the old one
            fits = nbytes + sum(entry.nbytes for entry in others if entry.is_named) <= budget
            assert cache.store(prefix, {}) == fits
            if fits:
                gone = [] if old is None else [old]
                for entry in [entry for entry in others if not entry.is_named]:
                    if nbytes + sum(entry.nbytes for entry in others) <= budget:
                        break
                    others.remove(entry)
                    gone.append(entry)
                assert all(entry.arrays is None for entry in gone)
                entries = {entry.ids: entry for entry in (*others, prefix)}
        elif step == "longest":
            best = max((k for k in entries if key[: len(k)] == k), key=len, default=None)
            if best is not None:
                entries[best] = entries.pop(best)
            assert cache.longest(key) is (None if best is None else entries[best])
        elif key in entries:
            cache.remove(entries.pop(key))
        assert [*cache.entries.items()] == [*entries.items()]
        assert all(entry.arrays is not None for entry in entries.values())
        assert cache.nbytes == sum(entry.nbytes for entry in entries.values()) <= budget
        assert cache.named_bytes == sum(entry.nbytes for entry in entries.values() if entry.is_named)


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
