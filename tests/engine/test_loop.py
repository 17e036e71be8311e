"""The engine loop, over a scripted model: no torch. Every request ends once, whatever happens to clients and thread."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from tests.engine.invariants import check_invariants
from tests.engine.scripted import scripted_engine
from tokenwright.engine import (
    Dropped,
    Failed,
    Finished,
    FinishReason,
    NoStopChecker,
    Request,
    SamplingParams,
    Token,
)
from tokenwright.engine.loop import AsyncListener, EngineLoop, Inbox
from tokenwright.errors import ContextError, EngineError


def counting(text):
    return text[-1] + 1


@pytest.fixture
def loop():
    engine, _ = scripted_engine(counting, pages=64, context=200, max_sequences=16)
    running = EngineLoop(engine)
    yield running
    if running._stopped is None:
        assert not running.call(lambda engine: check_invariants(engine.scheduler) or engine.scheduler.sequences)
        assert running.call(lambda engine: engine.pool.available == engine.pool.pages), "pages were left behind"
    running.close()


def asked(first, tokens=5):
    return Request((first, first + 1), SamplingParams(max_tokens=tokens))


def held(loop):
    """An event that lets the engine thread go on: no step begins before."""
    go_on = threading.Event()
    loop.post(lambda _: go_on.wait() and None)
    return go_on


def events_of(inbox):
    """All events until the last delivery of a request."""
    events, ended = [], False
    while not ended:
        for delivery in inbox.get():
            events += delivery.events
            ended = delivery.ended
    return events


def tokens(events):
    return [event.token for event in events if isinstance(event, Token)]


def test_a_handle_yields_its_events_in_order_and_ends(loop):
    [handle] = loop.submit([asked(10)], Inbox())
    events = list(handle)
    assert tokens(events) == [12, 13, 14, 15, 16]
    assert events[-1] == Finished(handle.sequence.id, FinishReason.LENGTH)
    assert handle.ended
    assert handle.submitted <= handle.started


def test_requests_that_are_submitted_together_join_the_same_step(loop):
    steps, forward = [], loop.engine.runner.forward
    loop.engine.runner.forward = lambda step: steps.append(len(step.chunks)) or forward(step)
    inbox = Inbox(at_end=5)
    handles = loop.submit([asked(first) for first in range(5)], inbox)
    deliveries = inbox.get()
    assert steps == [5] * 5
    assert {delivery.handle for delivery in deliveries if delivery.ended} == set(handles)


def test_a_request_that_is_refused_leaves_its_neighbours_out_too(loop):
    with pytest.raises(ContextError):
        loop.submit([asked(1), Request(tuple(range(300)))], Inbox())
    assert not loop.call(lambda engine: engine.busy)


def test_a_listener_is_called_once_per_step_for_all_its_requests(loop):
    class Counting:
        def __init__(self):
            self.calls = []
            self.over = threading.Event()

        def deliver(self, deliveries):
            self.calls.append(sorted(delivery.handle.sequence.id for delivery in deliveries))
            if all(delivery.ended for delivery in deliveries):
                self.over.set()

    listener = Counting()
    go_on = held(loop)
    ids = sorted(handle.sequence.id for handle in loop.submit([asked(first) for first in range(4)], listener))
    go_on.set()
    assert listener.over.wait(30)
    assert listener.calls == [ids] * 5


def test_an_event_loop_is_called_once_per_step_whatever_the_number_of_requests(loop):
    async def run():
        running = asyncio.get_running_loop()
        calls, over, call = [], asyncio.Event(), running.call_soon_threadsafe

        def receive(deliveries):
            calls.append(len(deliveries))
            if all(delivery.ended for delivery in deliveries):
                over.set()

        running.call_soon_threadsafe = lambda *given: scheduled.append(given) or call(*given)
        scheduled = []
        loop.submit([asked(first) for first in range(8)], AsyncListener(running, receive))
        await over.wait()
        return calls, len(scheduled)

    assert asyncio.run(run()) == ([8] * 5, 5)


def test_a_closed_event_loop_ends_its_requests(loop):
    event_loop = asyncio.new_event_loop()
    event_loop.close()
    go_on = held(loop)
    [handle] = loop.submit([asked(1, 150)], AsyncListener(event_loop, print))
    go_on.set()
    other = Inbox()
    loop.submit([asked(50, 20)], other)
    assert len(tokens(events_of(other))) == 20
    assert loop.call(lambda _: handle.ended)


@pytest.mark.parametrize("state", ["waiting", "running", "paused", "ended"])
def test_cancel_ends_a_request_in_every_state_and_nobody_else(loop, state):
    inbox, other, forward = Inbox(), Inbox(), loop.engine.runner.forward
    if state == "running":  # slowly enough to be cancelled in time
        loop.engine.runner.forward = lambda step: time.sleep(0.01) or forward(step)
    loop.submit([asked(100, 30)], other)
    [handle] = loop.submit([asked(1, 5 if state == "ended" else 150)], inbox, paused=state in ("waiting", "paused"))
    if state == "paused":
        handle.let_write(3)
        assert len(tokens(inbox.get()[0].events)) == 1
    if state == "running":
        inbox.get()
    events = events_of(inbox) if state == "ended" else []
    handle.cancel()
    handle.cancel()
    events = events or events_of(inbox)
    ends = [event for event in events if isinstance(event, Finished | Failed | Dropped)]
    assert [end.reason for end in ends] == [FinishReason.LENGTH if state == "ended" else FinishReason.ABORTED]
    assert tokens(events_of(other)) == list(range(102, 132))


def test_a_paused_request_writes_as_much_as_it_is_let_and_goes_on_when_resumed(loop):
    inbox = Inbox()
    [handle] = loop.submit([asked(1, 9)], inbox, paused=True)
    handle.let_write(2)
    seen = [delivery for _ in range(2) for delivery in inbox.get()]
    assert loop.call(lambda engine: (len(handle.sequence.written), engine.busy)) == (2, False)
    handle.resume()
    assert tokens([event for delivery in seen for event in delivery.events] + events_of(inbox)) == list(range(3, 12))


def test_all_texts_of_a_paused_request_write_as_much_as_it_is_let(loop):
    sampler, inbox = loop.engine.sampler, Inbox()
    pick = sampler.pick

    def forking(output, step):
        picks = zip(pick(output, step), step.chunks, strict=True)
        return [replace(one, choice=choice) for one, chunk in picks for choice in chunk.sequence.choices]

    def tokens_of_step():
        return sorted(tokens([event for delivery in inbox.get() for event in delivery.events]))

    sampler.pick = forking
    [handle] = loop.submit([Request((1, 2), SamplingParams(n=2, max_tokens=6))], inbox, paused=True)
    handle.let_write(1)
    assert tokens_of_step() == [3, 3]
    handle.use_cache(False)
    handle.let_write(2)
    assert [tokens_of_step() for _ in range(2)] == [[4, 4], [5, 5]]
    handle.let_write_up_to(6)
    assert tokens_of_step() == [6, 6]
    found = loop.call(lambda engine: [(one.paused, one.cache) for one in engine.scheduler.sequences.values()])
    assert found == [(True, False)] * 2
    handle.resume()
    assert tokens(events_of(inbox)) == [7, 7, 8, 8]


@pytest.mark.parametrize("mail", [False, True])
def test_a_paused_request_ends_at_its_deadline_while_nothing_is_computed(loop, mail):
    class Late(NoStopChecker):
        late = False

        def finished(self):
            return FinishReason.TIME if self.late else None

    checker, inbox = Late(), Inbox()
    [handle] = loop.submit([Request((1, 2), SamplingParams(max_tokens=9), checker)], inbox, paused=True)
    handle.let_write(1)
    inbox.get()
    assert not loop.call(lambda engine: engine.busy)
    checker.late = True
    while mail and not loop.call(lambda _: handle.ended):  # the mailbox is hardly ever empty
        pass
    assert events_of(inbox) == [Finished(handle.sequence.id, FinishReason.TIME)]


def test_without_the_cache_from_the_next_step_on(loop):
    [handle] = loop.submit([asked(1, 6)], Inbox(), paused=True)
    handle.use_cache(False)
    handle.resume()
    assert tokens(handle) == list(range(3, 9))
    assert handle.sequence.counts.forwarded == sum(range(2, 8))


def test_a_failing_engine_ends_every_request_and_says_so_to_whoever_asks(loop, caplog):
    inboxes = [Inbox(), Inbox()]
    go_on = held(loop)
    for inbox in inboxes:
        loop.submit([asked(1, 50)], inbox)

    def broken():
        raise MemoryError("planted")

    loop.engine.scheduler.schedule = broken
    go_on.set()
    for inbox in inboxes:
        [end] = events_of(inbox)
        assert "the engine has failed (MemoryError: planted)" in str(end.error)
    loop.driver.join()
    assert not loop.due, "whoever lends it turns waits for nothing"
    for ask in (lambda: loop.submit([asked(1)], Inbox()), lambda: loop.call(lambda engine: engine)):
        with pytest.raises(EngineError, match=r"planted\); open a new LLM"):
            ask()
    assert "the engine has failed" in caplog.text


def test_a_message_that_comes_too_late_is_refused_by_its_sender(loop):
    """The thread has ended, but the client looked before it had."""
    loop.close()
    loop.check = lambda: None
    inbox = Inbox()
    loop.submit([asked(1)], inbox)
    [end] = events_of(inbox)
    assert isinstance(end, Failed)
    with pytest.raises(EngineError, match="closed"):
        loop.call(lambda engine: engine)


def test_close_ends_what_is_being_written_with_an_error_and_joins_the_thread(loop):
    inbox = Inbox()
    [handle] = loop.submit([asked(1, 150)], inbox, paused=True)
    handle.let_write(3)
    inbox.get()
    loop.close()
    assert not loop.driver.thread.is_alive()
    assert isinstance(events_of(inbox)[-1], Failed)
    loop.close()
    with pytest.raises(EngineError, match="this LLM is closed"):
        loop.submit([asked(1)], Inbox())


def test_a_listener_that_fails_costs_its_own_requests_alone(loop, caplog):
    class Failing:
        def deliver(self, deliveries):
            raise RuntimeError("planted")

    inbox = Inbox()
    go_on = held(loop)
    [bad] = loop.submit([asked(1, 150)], Failing())
    loop.submit([asked(9, 20)], inbox)
    go_on.set()
    assert tokens(events_of(inbox)) == list(range(11, 31))
    assert bad.sequence.state == "finished"
    assert "a listener failed" in caplog.text


def test_no_signal_reaches_the_engine_thread(loop):
    blocked = loop.call(lambda _: signal.pthread_sigmask(signal.SIG_BLOCK, []))
    assert {signal.SIGINT, signal.SIGALRM, signal.SIGTERM} <= blocked


def test_a_forked_child_is_told_and_ends(loop):
    loop.submit([asked(1, 30)], Inbox())
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            loop.submit([asked(1)], Inbox())
        except EngineError as error:
            os.write(write, str(error).encode())
        loop.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    told = os.read(read, 1000).decode()
    os.close(read)
    os.close(write)
    assert "forked after an LLM was loaded" in told


def test_the_interpreter_ends_while_a_text_is_written():
    code = """
from tokenwright.engine import Request, SamplingParams
from tokenwright.engine.loop import EngineLoop, Inbox
from tests.engine.scripted import scripted_engine
engine, _ = scripted_engine(lambda text: text[-1] + 1, pages=9000, context=30000)
inbox = Inbox()
loop = EngineLoop(engine)
loop.submit([Request((1, 2), SamplingParams(max_tokens=20000))], inbox)
inbox.get()
print("over")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "over\n", "")
