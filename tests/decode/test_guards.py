"""The text guard with a sink that it is told everything about."""

from tokenwright.decode import TextGuard
from tokenwright.engine import FinishReason


class Letters:
    """Token n is the n-th letter; it stops at `stop` and holds back one letter at a time."""

    def __init__(self, stop=None):
        self.stop, self.held, self.stopped = stop, "", None

    def push(self, token):
        if chr(token) == self.stop:
            self.stopped = self.stop
            return ""
        shown, self.held = self.held, chr(token)
        return shown

    def finish(self):
        return "" if self.stopped else self.held


def test_end_tokens_end_and_are_no_text():
    guard = TextGuard(Letters(), {9, 10})
    assert guard.advance(ord("a")) is None
    assert guard.advance(10) is FinishReason.EOS
    assert guard.take() == ""
    assert guard.finish() == "a"
    assert not guard.stopped


def test_a_stop_string_ends_and_what_was_held_is_not_shown_twice():
    guard = TextGuard(Letters("!"), ())
    assert [guard.advance(ord(letter)) for letter in "ab!"] == [None, None, FinishReason.STOP]
    assert guard.stopped
    assert guard.take() == "a"
    assert guard.take() == ""
    assert guard.finish() == ""
