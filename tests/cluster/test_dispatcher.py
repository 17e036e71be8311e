"""Texts over replicas that die, drain, join and hang, in any order: each client gets the whole text, and gets it once.

The replicas are scripted: a token follows from all tokens before it, the seed and the number of the text.
"""

from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.profiles import examples
from tokenwright.cluster.dispatcher import Dispatcher
from tokenwright.cluster.replica_messages import (
    Begin,
    KeptFound,
    Report,
    RouterBusy,
    Tell,
    TextNews,
    Warmed,
    orders_of,
    packed_event,
)
from tokenwright.cluster.routed_handle import RoutedHandle, TextInFlight
from tokenwright.cluster.router import ReplicaPages
from tokenwright.engine import (
    Engine,
    Failed,
    Finished,
    FinishReason,
    Forked,
    Group,
    PagePool,
    PrefixIndex,
    PromptLogprobs,
    Request,
    SamplingParams,
    Scheduler,
    Token,
)
from tokenwright.engine.warming import WarmRules
from tokenwright.errors import EngineError, ReplicaError, RequestError
from tokenwright.llm.prompts.kept import KeptHashes, KeptText, KeptTokens

SIZE, RETRIES = 2, 3


def next_token(text, seed, choice):
    return (sum((at + 1) * token for at, token in enumerate(text)) + 7 * (seed or 0) + 31 * choice) % 89


def whole(request, choice):
    """The text that a request must come to."""
    text = list(request.prompt)
    while len(text) < len(request.prompt) + request.params.max_tokens:
        text.append(next_token(text, request.params.seed, choice))
    return text[len(request.prompt) :]


class ScriptedReplica:
    """Writes what it was sent, a token at each step. deaf: it has died, or hangs."""

    def __init__(self, dispatcher, pool_pages=50):
        self.dispatcher = dispatcher
        self.deaf = False
        self.orders = {}
        self.texts = {}
        self.told = {}  # prompt log-probabilities that were reported
        self.paused = set()
        self.member = dispatcher.join(self, ReplicaPages([Group(pool_pages)], SIZE, b"", b""), pool_pages)

    def send(self, message):
        assert not self.deaf, "the dispatcher knows who is gone"
        match message:
            case Begin(number=number, order=order, paused=paused):
                assert number not in self.orders
                self.orders[number] = order
                self.texts[number] = [*order.prompt, *order.written]
                if paused:
                    self.paused.add(number)
            case Tell(number=number, what="cancel"):
                self.orders.pop(number, None)  # it may have ended in the step that ends its request
            case Tell(number=number, what="pause"):
                self.paused.add(number)
            case Tell(number=number, what="resume"):
                self.paused.discard(number)

    def step(self, tokens=1):
        """One step of each text, as a report."""
        news = [self.news(number, tokens) for number in list(self.orders) if number not in self.paused]
        self.dispatcher.report(self.member, Report([], news, 40, 5))

    def news(self, number, tokens):
        order, text, events = self.orders[number], self.texts[number], []
        start = order.prompt_logprobs_from
        if start is not None and self.told.get(number, start) < len(order.prompt):
            at = self.told.get(number, start)
            self.told[number] = at + 1
            events.append(PromptLogprobs(5, at, (float(-at),)))
        else:
            for _ in range(min(tokens, len(order.prompt) + order.params.max_tokens - len(text))):
                text.append(next_token(text, order.params.seed, order.choice))
                events.append(Token(5, text[-1], -1.0, text=f"<{text[-1]}>"))
        ended = len(text) == len(order.prompt) + order.params.max_tokens and start is None
        ended |= (
            start is not None
            and self.told.get(number, start) >= len(order.prompt)
            and len(text) == len(order.prompt) + order.params.max_tokens
        )
        if ended:
            events.append(Finished(5, FinishReason.LENGTH))
            del self.orders[number]
        return TextNews(number, events, ended, 0.5, 2, 0, 0)


class Client:
    """A listener of one request, which checks the order of what it hears."""

    def __init__(self, request):
        self.request = request
        self.texts = {}
        self.choices = {}
        self.logprobs = []
        self.ends = {}
        self.ended = False
        self.error = None

    def deliver(self, deliveries):
        for delivery in deliveries:
            assert not self.ended, "nothing follows the last delivery"
            for event in delivery.events:
                self.hear(event, delivery.handle)
            self.ended = delivery.ended

    def hear(self, event, handle):
        first = handle.sequence.id
        self.choices.setdefault(first, 0)
        match event:
            case Forked(sequence=number, parent=parent, branch=branch):
                assert parent == first and number not in self.choices
                self.choices[number] = branch.choices[0]
            case Token(sequence=number, token=token, text=text):
                assert number in self.choices and number not in self.ends and text == f"<{token}>"
                self.texts.setdefault(number, []).append(token)
            case PromptLogprobs(sequence=number, start=start, logprobs=logprobs):
                assert number == first and start == len(self.logprobs) + 1
                self.logprobs += logprobs
            case Finished(sequence=number, reason=reason):
                assert number in self.choices and number not in self.ends
                self.ends[number] = reason
            case Failed(sequence=number, error=error):
                assert number not in self.ends
                self.ends[number], self.error = None, error


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Setting:
    """A dispatcher with scripted replicas and clients."""

    def __init__(self, replicas=2):
        self.clock = Clock()
        self.dispatcher = Dispatcher(RETRIES, self.clock)
        pool = PagePool([Group(50)], SIZE)
        self.engine = Engine(None, None, Scheduler(pool, 8, 8, PrefixIndex(pool, b"", b"")), 60)
        self.replicas = [ScriptedReplica(self.dispatcher) for _ in range(replicas)]
        self.clients = []

    def ask(self, prompt=(1, 2, 3), **params):
        request = Request(tuple(prompt), SamplingParams(**{"seed": 1, "max_tokens": 6, **params}))
        if request.params.prompt_logprobs is not None:
            request = Request(request.prompt, request.params, prompt_logprobs_from=1)
        orders, first = list(orders_of(request, [])), self.engine.accept(request)
        rest = [first.fork(next(self.engine.scheduler.ids), [], order.choice) for order in orders[1:]]
        texts = [TextInFlight(one, order, one is first) for one, order in zip([first, *rest], orders, strict=True)]
        client = Client(request)
        client.handle = RoutedHandle(self.clock, texts, client, self.clock(), self.tell)
        self.clients.append(client)
        self.dispatcher.add(client.handle)
        return client

    def tell(self, what, handle):
        self.dispatcher.tell(what, handle)

    def kill(self, replica, died=True):
        replica.deaf = True
        self.replicas.remove(replica)
        self.dispatcher.leave(replica.member, died=died)

    def join(self):
        self.replicas.append(ScriptedReplica(self.dispatcher))

    def finish(self):
        while any(replica.orders.keys() - replica.paused for replica in self.replicas):
            for replica in self.replicas:
                replica.step()


class Cluster(RuleBasedStateMachine):
    @initialize(replicas=st.integers(0, 3))
    def build(self, replicas):
        self.setting = Setting(replicas)
        self.cancelled = set()

    @rule(
        prompt=st.lists(st.integers(0, 3), min_size=1, max_size=9),
        seed=st.integers(0, 3),
        n=st.integers(1, 3),
        tokens=st.integers(0, 8),
        logprobs=st.booleans(),
    )
    def ask(self, prompt, seed, n, tokens, logprobs):
        self.setting.ask(prompt, seed=seed, n=n, max_tokens=tokens, prompt_logprobs=0 if logprobs else None)

    @precondition(lambda self: self.setting.replicas)
    @rule(who=st.integers(0, 9), tokens=st.integers(1, 3))
    def step(self, who, tokens):
        self.setting.replicas[who % len(self.setting.replicas)].step(tokens)

    @precondition(lambda self: self.setting.replicas)
    @rule(who=st.integers(0, 9), died=st.booleans())
    def kill(self, who, died):
        self.setting.kill(self.setting.replicas[who % len(self.setting.replicas)], died)

    @precondition(lambda self: len(self.setting.replicas) < 4)
    @rule()
    def join(self):
        self.setting.join()

    @precondition(lambda self: self.setting.replicas)
    @rule(who=st.integers(0, 9))
    def drain(self, who):
        self.setting.dispatcher.drain(self.setting.replicas[who % len(self.setting.replicas)].member)

    @precondition(lambda self: self.setting.clients)
    @rule(who=st.integers(0, 9), what=st.sampled_from(["cancel", "pause", "resume"]))
    def tell(self, who, what):
        client = self.setting.clients[who % len(self.setting.clients)]
        if not client.ended:
            getattr(client.handle, what)()
            if what == "cancel":
                self.cancelled.add(client)

    def teardown(self):
        if not hasattr(self, "setting"):
            return
        self.setting.join()
        for client in self.setting.clients:
            client.handle.resume()
        self.setting.finish()
        for client in self.setting.clients:
            self.check(client)
        assert self.setting.dispatcher.waiting == 0
        for replica in self.setting.replicas:
            assert replica.member.routed.texts == {} and replica.member.routed.work == 0
            assert not replica.orders, "a replica writes for nobody"

    def check(self, client):
        assert client.ended, "every request ends"
        for number, tokens in client.texts.items():
            expected = whole(client.request, client.choices[number])
            assert tokens == expected[: len(tokens)], "the text is that of one replica"
            assert client.ends[number] is not FinishReason.LENGTH or tokens == expected
        if client.error is not None:
            assert isinstance(client.error, ReplicaError) and client.handle.moves > RETRIES
        elif client not in self.cancelled:
            assert sorted(client.choices.values()) == list(range(client.request.params.n))
            assert set(client.ends.values()) == {FinishReason.LENGTH}
            if client.request.params.prompt_logprobs is not None:
                assert client.logprobs == [float(-at) for at in range(1, len(client.request.prompt))]


Cluster.TestCase.settings = examples(200, stateful_step_count=30)
TestCluster = Cluster.TestCase


def test_a_text_goes_on_at_the_same_token_and_the_move_is_counted():
    setting = Setting()
    client = setting.ask()
    [first] = [replica for replica in setting.replicas if replica.orders]
    first.step(2)
    setting.kill(first)
    [second] = setting.replicas
    [order] = second.orders.values()
    assert order.written == tuple(whole(client.request, 0)[:2])
    setting.finish()
    assert client.texts[client.handle.sequence.id] == whole(client.request, 0)
    assert client.handle.moves == 1


def test_a_text_whose_replicas_all_die_fails_and_says_what_was_delivered():
    setting = Setting(0)
    client = setting.ask(max_tokens=20)
    for _ in range(RETRIES + 1):
        setting.join()
        assert not client.ended
        setting.replicas[0].step(2)
        setting.kill(setting.replicas[0])
    assert client.ended
    with pytest.raises(ReplicaError, match=r"4 replicas died .* 8 tokens of it were delivered"):
        raise client.error


def test_a_replica_that_is_replaced_on_purpose_counts_as_a_move_and_not_as_a_death():
    setting = Setting(1)
    client = setting.ask(max_tokens=20)
    for _ in range(RETRIES + 3):
        setting.join()
        setting.replicas[0].step()
        setting.kill(setting.replicas[0], died=False)
    setting.finish()
    assert client.error is None and client.handle.moves == RETRIES + 3


def test_a_text_that_waits_for_a_replica_ends_at_its_deadline():
    setting = Setting(1)
    client = setting.ask(max_tokens=20, max_seconds=5.0)
    setting.replicas[0].step()
    setting.kill(setting.replicas[0])
    setting.clock.now += 4
    setting.dispatcher.expire()
    assert not client.ended
    setting.clock.now += 2
    setting.dispatcher.expire()
    assert client.ended and list(client.ends.values()) == [FinishReason.TIME]
    assert client.texts[client.handle.sequence.id] == whole(client.request, 0)[:1]


def test_the_next_replica_has_what_is_left_of_the_deadline():
    setting = Setting()
    setting.ask(max_tokens=20, max_seconds=5.0)
    [first] = [replica for replica in setting.replicas if replica.orders]
    setting.clock.now += 2
    setting.kill(first)
    [order] = setting.replicas[0].orders.values()
    assert order.params.max_seconds == 3.0


def test_the_news_of_a_replica_that_was_given_up_are_not_heard():
    setting = Setting()
    client = setting.ask()
    [first] = [replica for replica in setting.replicas if replica.orders]
    late = first.news(next(iter(first.orders)), 3)
    setting.kill(first)
    setting.dispatcher.report(setting.replicas[0].member, Report([], [late], 0, 0))  # the number is another's now
    setting.dispatcher.report(first.member, Report([], [late], 0, 0))
    assert client.texts == {client.handle.sequence.id: [event.token for event in late.events]}


@pytest.mark.parametrize("failing", [(1,), (0, 1, 2), (1, 2)])
def test_texts_that_fail_end_the_others_of_their_request(failing):
    setting = Setting(1)
    client = setting.ask(n=3)
    [replica] = setting.replicas
    news = [replica.news(number, 1) for number in replica.orders]  # a step that fails may fail all of them
    for at in failing:
        number = news[at].number
        news[at] = TextNews(number, [packed_event(Failed(5, RequestError("bad")))], True, 0, 0, 0, 0)
        del replica.orders[number]
    setting.dispatcher.report(replica.member, Report([], news, 0, 0))
    assert client.ended and str(client.error) == "bad"
    assert not replica.orders and not replica.member.routed.texts


def test_warm_ups_go_where_their_prefix_is_and_rest_while_any_replica_has_a_text():
    setting, told = Setting(2), []
    heard = {replica: [] for replica in setting.replicas}
    for replica, messages in heard.items():
        replica.send = lambda message, send=replica.send, messages=messages: (messages.append(message), send(message))
    home, other = setting.replicas[1], setting.replicas[0]
    request = Request((*range(1, 10), 9), SamplingParams(max_tokens=0))
    [order], hashes = orders_of(request, []), setting.engine.accept(request).prefix_hashes
    setting.dispatcher.report(home.member, Report([(0, one, True) for one in hashes.extend(request.prompt)], [], 40, 5))
    rules = WarmRules((1, 2), computed=lambda *chunk: told.append(chunk), spare=True)
    setting.dispatcher.warm(order, hashes, rules)
    busy, warm = heard[home]
    assert (busy, warm.order, warm.after, warm.spare, heard[other]) == (RouterBusy(False), order, (1, 2), True, [])
    setting.dispatcher.warmed(Warmed(warm.number, 4, 5))
    setting.dispatcher.warmed(Warmed(warm.number + 1, 0, 1))
    assert told == [(4, 5)]
    client = setting.ask()
    assert heard[home][2:][:1] == heard[other][:1] == [RouterBusy(True)], "wherever the text goes, and before it"
    setting.dispatcher.warm(order, hashes, rules)
    assert RouterBusy(True) in heard[home][-3:] + heard[other][-3:]
    setting.finish()
    assert client.ended and heard[home][-1] == heard[other][-1] == RouterBusy(False)


def test_a_text_that_is_looked_for_goes_to_each_replica_once():
    """The panel Conversations asks each second for texts of megabytes."""
    dispatcher, sent = Dispatcher(RETRIES, lambda: 0.0), []

    class Looking:
        """A replica's end, by the same rules."""

        def __init__(self):
            self.hashes, self.asked = KeptHashes(), []

        def send(self, message):
            sent.append([one.name for one in message.texts if one.ids is not None])
            self.asked.append(message)

        def answer(self):
            while self.asked:
                asked = self.asked.pop(0)
                texts = [self.hashes.of(one) for one in asked.texts]
                lacking = texts.index(None) if None in texts else None
                found = KeptTokens(() if lacking is not None else tuple((len(one[0]), 0) for one in texts), ())
                dispatcher.answered(KeptFound(asked.number, found, lacking), self)

    replicas = [Looking(), Looking()]
    for at, one in enumerate(replicas):
        dispatcher.join(one, ReplicaPages([Group(5)], SIZE, b"", b""), 5, at)

    def looked(*lengths):
        texts = [KeptText(f"text of {length}", array("I", range(length)).tobytes(), b"", SIZE) for length in lengths]
        with dispatcher.look(texts, "") as found:
            for one in replicas:
                one.answer()
        assert [one.texts for one in found] == 2 * [tuple((length, 0) for length in lengths)]
        told, sent[:] = [names for names in sent if names], []
        return told

    assert sorted(looked(9, 4, 0)) == sorted(2 * [["text of 9"], ["text of 4"], ["text of 0"]])
    assert looked(9, 4, 0) == []
    assert looked(4, 7, 9) == 2 * [["text of 7"]]


def test_a_listener_that_fails_loses_its_request_alone(caplog):
    setting = Setting(1)
    bad, good = setting.ask(), setting.ask()
    bad.deliver = lambda _: 1 / 0
    setting.replicas[0].step()
    setting.finish()
    assert good.ended and good.error is None
    assert "a listener failed" in caplog.text


def test_a_beam_search_is_refused():
    request = Request((1,), SamplingParams(beams=2), search=object(), width=2)
    with pytest.raises(RequestError, match="beams"):
        list(orders_of(request, []))


def test_closing_fails_what_runs_and_what_waits():
    setting = Setting(1)
    runs = setting.ask()
    setting.dispatcher.drain(setting.replicas[0].member)
    waits = setting.ask()
    assert setting.dispatcher.waiting == 1
    setting.dispatcher.close(EngineError("closed"))
    assert runs.ended and waits.ended and str(runs.error) == str(waits.error) == "closed"
