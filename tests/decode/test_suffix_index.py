"""The suffix index against its definition: the longest end of a text that stands in another, found by comparing all."""

from hypothesis import given
from hypothesis import strategies as st

from tokenwright.decode.drafts import speculate
from tokenwright.decode.drafts.speculate import BETWEEN, LEAD, LEAST, LONGEST, EarlierTexts, SuffixIndex

texts = st.lists(st.integers(0, 2), max_size=40)


def built(*parts):
    index = SuffixIndex()
    for part in parts:
        index.extend(part)
    return index


def agreeing(known, place, text):
    """How many of the last tokens of `text` end at `place`."""
    length = 0
    while length < min(len(text), place + 1, LONGEST) and known[place - length] == text[-1 - length]:
        length += 1
    return length


@given(texts, texts, texts)
def test_it_finds_a_longest_match_among_the_latest_places(first, second, text):
    index = built(first, second)
    known = [*first, *second]
    match = index.longest(text)
    lengths = {place: agreeing(known, place, text) for place in range(len(known) - 1)}
    most = max(lengths.values(), default=0)
    assert (match is None) == (most < LEAST)
    if match is not None:
        assert lengths[match.after - 1] == match.length
        latest = sorted((place for place in lengths if lengths[place] >= LEAST), reverse=True)
        assert match.length == max(lengths[place] for place in latest[: speculate.CANDIDATES])


def test_of_equal_matches_the_latest_counts():
    index = built([1, 2, 3, 4, 1, 2, 3, 5, 9])
    match = index.longest([1, 2, 3])
    assert (match.length, match.following(9, repeats=False)) == (3, [5, 9])


def test_a_text_that_goes_round_goes_on_so():
    index = built([7, 1, 2, 3, 1, 2, 3])
    match = index.longest([7, 1, 2, 3, 1, 2, 3])
    assert match.following(8, repeats=True) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert match.following(8, repeats=False) == [1, 2, 3]


def test_nothing_is_read_across_two_texts():
    index = built([1, 2, 3, BETWEEN, 4, 5, 6])
    assert index.longest([1, 2, 3]).following(5, repeats=True) == []
    assert index.longest([3, 4, 5]) is None


def test_earlier_texts_are_kept_by_key():
    earlier = EarlierTexts(1 << 20)
    earlier.add(b"mine", range(20), [50, 51, 52, 53])
    assert earlier.of(b"other") == ()
    (index,) = earlier.of(b"mine")
    assert index.longest([50, 51, 52]).following(5, repeats=False) == [53]
    assert index.longest([17, 18, 19]).following(2, repeats=False) == [50, 51], "the prompt's end leads to the answer"
    assert index.tokens.tolist() == [BETWEEN, *range(20 - LEAD, 20), 50, 51, 52, 53, BETWEEN]


def test_the_key_that_was_not_used_for_longest_goes_first():
    one = built(range(6)).nbytes
    earlier = EarlierTexts(3 * one)
    for key in (b"a", b"b"):
        earlier.add(key, [], range(10))
    assert earlier.of(b"a")
    earlier.add(b"c", [], range(10))
    assert [bool(earlier.of(key)) for key in (b"a", b"b", b"c")] == [True, False, True]
    assert earlier.nbytes <= earlier.capacity


def test_a_key_has_bounded_texts(monkeypatch):
    monkeypatch.setattr(speculate, "GENERATION", 64)
    earlier = EarlierTexts(1 << 20)
    for start in range(0, 1000, 20):
        earlier.add(b"", [], range(start, start + 20))
        assert sum(len(index.tokens) for index in earlier.of(b"")) <= 2 * 64 + 2 * 22
    assert any(index.longest([981, 982, 983]) for index in earlier.of(b""))
    assert not any(index.longest([1, 2, 3]) for index in earlier.of(b""))


def test_no_bytes_keep_nothing():
    earlier = EarlierTexts(0)
    earlier.add(b"", [], range(10))
    assert earlier.of(b"") == () and earlier.nbytes == 0
