"""Preemption where pages run out; then the whole file beside the real engine (real.py)."""

from collections.abc import Iterator
from typing import Any

from ..cell import expect
from ..one_file import original
from ..steps import small, steps

TITLE = "Preemption"
TEXT = """
Texts are admitted while there is room for them, and they grow. One day a step needs a page and none is available.
Then the youngest text gives up all of its pages and waits, before all others that wait. It keeps its tokens. When
there is room again it is computed anew, or found by its hashes, and goes on as if nothing had been. So the oldest
text always ends, and nothing is stuck.

This is the last part. When it is right, the check puts all parts that you have solved into the file, and runs it
beside the real engine in this page: greedy and seeded texts, chunks, shared prefixes, and a pool that is too small
for them.
"""
PARTS = ("Scheduler._reserve", "Scheduler._preempt")
START = '''\
def _reserve(self, sequence, stop):
    """Allocate pages up to token `stop`, and preempt younger texts for them.

    False: this text was the youngest itself, and waits now.
    """
    while len(sequence.pages) * self.pool.page_size < stop:
        if not self.pool.available:
            # Not yet! The youngest text gives up its pages: _preempt returns it.
            # If it is another text than this one, go on.
            return False
        sequence.pages.append(self.pool.allocate())
    return True

def _preempt(self):
    """Take the pages of the youngest running text, and let it wait. Returns it."""
    sequence = self.running.pop()
    # Its pages go back to the pool, and K and V of none of its tokens are kept.
    # It waits before all others: self.waiting is a deque, the oldest at its left.
    self.preemptions += 1
    return sequence
'''


def check(file: Any) -> Iterator[None]:
    check_preempt(file)
    check_reserve(file)
    yield
    mine, right = (engine(one) for one in (file, original()))
    for done, _ in enumerate(zip(steps(mine), steps(right), strict=False), 1):
        try:
            mine.scheduler.check()
        except AssertionError as error:
            expect(False, f"After step {done} an invariant does not hold: {error}.")
    texts = [[one.tokens for one in each.texts] for each in (mine, right)]
    expect(texts[0] == texts[1], "Preempted texts go on in another way: look at computed, and at the order of waiting.")
    print(f"four texts in {mine.pool.pages} pages: {mine.scheduler.preemptions} preemptions, and all of them ended")


def engine(file: Any) -> Any:
    made = file.Engine(small(file), pages=7, page_size=2, token_budget=6)
    made.texts = [made.add([n, 9, 4], file.Sampling(0.8, 1.0, n, 9)) for n in (1, 2, 3, 4)]
    return made


def running(file: Any, pages: int) -> Any:
    """A scheduler with two running texts, of two pages each, and one that waits."""
    scheduler = file.Scheduler(file.Pool(pages, 2), 8, [])
    texts = [file.Sequence([n] * 4, file.Sampling(), 20, computed=4) for n in (1, 2, 3)]
    for text in texts[:2]:
        text.pages = [scheduler.pool.allocate(), scheduler.pool.allocate()]
        scheduler.running.append(text)
    texts[2].computed = 0
    scheduler.waiting.append(texts[2])
    scheduler.texts = texts
    return scheduler


def check_preempt(file: Any) -> None:
    scheduler = running(file, 4)
    oldest, youngest, waiting = scheduler.texts
    found = scheduler._preempt()
    expect(found is youngest, "_preempt must take the youngest text, the last of self.running, and return it.")
    expect(scheduler.running == [oldest], "Only the youngest leaves self.running.")
    expect(not youngest.pages, "The preempted text still has its pages: release them to the pool.")
    expect(
        len(scheduler.pool.available) == 2,
        "The pages of the preempted text are not available: call release, which counts.",
    )
    expect(
        youngest.computed == 0,
        f"Its K and V are gone, and computed is {youngest.computed}: they would not be computed again.",
    )
    expect(youngest in scheduler.waiting, "The preempted text is in no list, so it never ends: it must wait.")
    order = "The preempted text is older than all that wait, and stands behind them: look at the end of the deque."
    expect(list(scheduler.waiting) == [youngest, waiting], order)
    expect(len(youngest.tokens) == 4, "The tokens of a preempted text are kept.")


def check_reserve(file: Any) -> None:
    scheduler = running(file, 4)
    oldest, youngest, _ = scheduler.texts
    answer = scheduler._reserve(oldest, 6)
    expect(scheduler.running == [oldest], "The oldest text needs a page, and the youngest must give up its own for it.")
    expect(answer is True, f"After the youngest gave up its pages, _reserve must go on and return True, not {answer}.")
    expect(len(oldest.pages) == 3, f"Six tokens need three pages of two; the table has {len(oldest.pages)}.")
    scheduler = running(file, 4)
    oldest, youngest, _ = scheduler.texts
    answer = scheduler._reserve(youngest, 6)
    expect(oldest in scheduler.running, "The youngest itself needs a page: an older text was preempted for it.")
    expect(
        youngest not in scheduler.running, "The youngest needs a page that it cannot get: it must be preempted itself."
    )
    gone = f"The text that needs the page was preempted itself and computes nothing now: return False, not {answer}."
    expect(answer is False, gone)
    expect(not youngest.pages, "A preempted text got pages.")
