"""The text guard with a sink that it is told everything about."""

import copy

from tokenwright.decode import TextStopChecker
from tokenwright.engine import FinishReason


class Letters:
    """Token n is the n-th letter; it stops at `stop` and holds back one letter at a time."""

    def __init__(self, stop=None):
        self.stop, self.held, self.stopped = stop, "", None

    def push(self, token, armed=True):
        if chr(token) == self.stop and armed:
            self.stopped = self.stop
            return ""
        shown, self.held = self.held, chr(token)
        return shown

    def finish(self):
        return "" if self.stopped else self.held

    def fork(self):
        return copy.copy(self)


class Counting:
    """A grammar of so many tokens."""

    def __init__(self, left):
        self.left = left

    answering = True

    def mask(self, left=None):
        return [self.left]

    def advance(self, token):
        self.left -= 1
        return self.left == 0

    def fork(self):
        return Counting(self.left)


def test_end_tokens_end_and_are_no_text():
    stop_checker = TextStopChecker(Letters(), {9, 10})
    assert stop_checker.advance(ord("a")) is None
    assert stop_checker.advance(10) is FinishReason.EOS
    assert stop_checker.take_text() == ""
    assert stop_checker.finish() == "a"
    assert stop_checker.stopped is None


def test_a_stop_string_ends_and_what_was_held_is_not_shown_twice():
    stop_checker = TextStopChecker(Letters("!"), ())
    assert [stop_checker.advance(ord(letter)) for letter in "ab!"] == [None, None, FinishReason.STOP]
    assert stop_checker.stopped == "!"
    assert stop_checker.take_text() == "a"
    assert stop_checker.take_text() == ""
    assert stop_checker.finish() == ""


def test_a_stop_id_ends_and_is_text_only_where_it_is_included():
    for include, text in (False, "a"), (True, "ab"):
        stop_checker = TextStopChecker(Letters(), (), {ord("b")}, include_stop=include)
        assert [stop_checker.advance(ord(letter)) for letter in "ab"] == [None, FinishReason.STOP_ID]
        assert stop_checker.stopped == ord("b")
        assert stop_checker.finish() == text


def test_the_first_min_tokens_end_nothing():
    stop_checker = TextStopChecker(Letters("!"), {9}, {8}, min_tokens=3)
    assert [stop_checker.advance(token) for token in (ord("!"), 9, 8, ord("!"))] == [
        None,
        None,
        None,
        FinishReason.STOP,
    ]


def test_a_grammar_ends_with_its_last_token_unless_a_stop_string_did():
    stop_checker = TextStopChecker(Letters("!"), (), constraint=Counting(2))
    assert stop_checker.mask() == [2]
    assert [stop_checker.advance(ord(letter)) for letter in "ab"] == [None, FinishReason.GRAMMAR]
    stop_checker = TextStopChecker(Letters("!"), (), constraint=Counting(2))
    assert [stop_checker.advance(ord(letter)) for letter in "a!"] == [None, FinishReason.STOP]


def test_the_deadline_is_asked_of_the_clock():
    now = 5.0
    stop_checker = TextStopChecker(Letters(), (), deadline=7.0, clock=lambda: now)
    assert stop_checker.finished() is None
    now = 7.0
    assert stop_checker.finished() is stop_checker.fork().finished() is FinishReason.TIME
    assert TextStopChecker(Letters(), ()).finished() is None


def test_forks_go_their_own_ways():
    stop_checker = TextStopChecker(Letters("!"), (), min_tokens=1, constraint=Counting(5))
    stop_checker.advance(ord("a"))
    other = stop_checker.fork()
    assert other.advance(ord("!")) is FinishReason.STOP
    assert stop_checker.advance(ord("b")) is None
    assert (stop_checker.stopped, other.stopped) == (None, "!")
    assert stop_checker.mask() == other.mask() == [3]
    assert stop_checker.finish() == "ab"
    assert other.finish() == ""
