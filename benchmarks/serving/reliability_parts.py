"""The parts of `reliability.py`. Each takes a running server, a report for its findings, and a scale of its size.

Invariants: every page is free when nothing runs, every text is the undisturbed one, and no accepted request is lost.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.serving.http_client import Address, Exchange, Reply, ask, packed, send
from benchmarks.serving.served import Health, Server, quantile
from benchmarks.serving.traffic import Told, Wanted, answer, fixed, mixed, told
from benchmarks.serving.verdicts import Report

MB, KB = 2**20, 2**10
AT_ONCE = 32  # clients
PAGE = 16  # tokens
MANY = 40  # prompts of one request
ABREAST = 32  # of these, as many as the server has in its queue or its engine at a time
Trial = Callable[[], Awaitable[object]]


async def in_turns(trials: Sequence[Trial], at_once: int = AT_ONCE) -> list[Any]:
    """Run all, at most `at_once` at a time; the results, or the ValueError or OSError of each that failed."""
    gate = asyncio.Semaphore(at_once)

    async def one(trial: Trial) -> object:
        async with gate:
            try:
                return await trial()
            except (ValueError, OSError) as error:
                return error

    return list(await asyncio.gather(*(one(trial) for trial in trials)))


async def texts_of(server: Server, wanted: Sequence[Wanted], at_once: int) -> list[Any]:
    return await in_turns([lambda one=one: answer(server.address, one) for one in wanted], at_once)  # type: ignore[misc]


async def same_text(report: Report, server: Server, before: Told) -> None:
    """The next reply is right."""
    [after] = await texts_of(server, [fixed(48)], 1)
    report.invariant(
        "the next reply is the same text", after == before, "yes" if after == before else repr(after)[:200]
    )


async def at_rest(report: Report, server: Server, within_s: float | None = None) -> None:
    """Nothing runs, and free and cached pages are all pages."""
    seconds = await asyncio.to_thread(server.rest_s)
    now = server.metrics()
    figure = f"{now['pages_available']:.0f} of {now['pages']:.0f} pages, {now['requests_running']:.0f} run"
    report.invariant("free + cached pages = initial, none running", seconds is not None, figure)
    if within_s is not None and seconds is not None:
        report.target("that state comes within", seconds, within_s, "s")


def same_texts(report: Report, found: Sequence[Any], undisturbed: Sequence[Any]) -> None:
    """Each text is the undisturbed one."""
    lost = [one for one in found if isinstance(one, Exception)]
    other = [(a, b) for a, b in zip(found, undisturbed, strict=True) if a != b and not isinstance(a, Exception)]
    report.invariant("replies lost", not lost, f"{len(lost)} of {len(found)} {lost[:1] or ''}".strip(), "0")
    report.invariant("texts other than undisturbed", not other, f"{len(other)} {other[:1] or ''}".strip(), "0")


async def kills(server: Server, report: Report, scale: float) -> None:
    """Clients that go away at a random point, streaming and not, with one prompt and with two."""
    count = max(8, round(1000 * scale))
    [before] = await texts_of(server, [fixed(48)], 1)
    draws, length = random.Random(1), min(1900, longest(int(server.metrics()["pages"])))

    async def killed() -> str:
        body = fixed(length, draws.random() < 0.5).sent()
        if draws.random() < 0.25:
            body |= {"n": 2, "temperature": 1.0, "max_tokens": length // 2}
        elif draws.random() < 0.25:
            body |= {"prompt": ["One day", "One night"], "max_tokens": length // 2}
        exchange = await send(server.address, packed(server.address, "/v1/completions", body))
        try:
            async with asyncio.timeout(draws.random() ** 2 / 2):
                return "whole" if (await exchange.reply()).status == 200 else "refused"
        except TimeoutError:
            return "killed"
        finally:
            exchange.close()

    await in_turns([killed] * count)  # memory grows to its level
    await asyncio.to_thread(server.rest_s)
    memory = server.memory()
    ends = await in_turns([killed] * count)
    told_all = all(end in ("killed", "whole") for end in ends) and "killed" in ends
    report.invariant("clients killed; the others read a whole reply", told_all, f"{ends.count('killed')} of {count}")
    await at_rest(report, server, 1.0)
    report.target("growth of memory (RssAnon + swap)", (server.memory() - memory) / MB, 5, "MB")
    await same_text(report, server, before)


async def pool(server: Server, report: Report, scale: float) -> None:
    """Mixed requests at once through a pool of 1.2 longest requests."""
    metrics = server.metrics()
    wanted = mixed(max(16, round(512 * scale)), 2, longest(int(metrics["pages"])))
    undisturbed = await texts_of(server, [one.whole() for one in wanted], 1)
    report.invariant("undisturbed texts", not any(isinstance(t, Exception) for t in undisturbed), len(undisturbed))
    before = server.metrics()["preemptions_total"]
    most = 0

    async def one(request: Wanted) -> Told:
        nonlocal most
        reply = await ask(server.address, request.path, request.sent())
        most = max(most, preemptions(reply, request.stream))
        return told(reply, request.stream)

    began = time.monotonic()
    found = await in_turns([lambda it=it: one(it) for it in wanted], len(wanted))  # type: ignore[misc]
    report.figure(f"{len(wanted)} requests, {int(metrics['pages'])} pages", f"{time.monotonic() - began:.1f} s")
    same_texts(report, found, undisturbed)
    report.figure("preemptions in all", f"{server.metrics()['preemptions_total'] - before:.0f}")
    report.target("preemptions of one request", most, 4, "times")
    await at_rest(report, server)


def longest(pages: int) -> int:
    """The tokens of the longest request where a pool of `pages` is 1.2 of them."""
    return int(pages / 1.2) * PAGE


def preemptions(reply: Reply, stream: bool) -> int:
    """How often a reply says that it was preempted."""
    if reply.status != 200:
        return 0
    said = (event["timings"] for event in (reply.events() if stream else [reply.json()]) if event.get("timings"))
    return max((int(one["preemptions"]) for one in said), default=0)


async def queue(server: Server, report: Report, scale: float) -> None:
    """Fill the queue, and ask for more; all that were accepted finish."""
    cap = int(server.settings["max_queue"])
    wanted = fixed(192)
    [right] = await texts_of(server, [wanted], 1)
    await asyncio.to_thread(server.rest_s)
    memory, ended = server.memory(), ended_in(server.metrics())
    data = packed(server.address, wanted.path, wanted.sent())
    with Health(server) as health:
        waiting: list[Exchange] = []
        most = 0.0
        while most < cap and len(waiting) < 3 * cap:  # some are served meanwhile
            waiting += await _fill(server, data, cap + 64 if not waiting else max(16, cap // 16))
            most = max(most, await _taken(server, len(waiting), cap, ended))
        held = max(1, most)
        grown = (server.memory() - memory) / held
        replies = asyncio.gather(*(_result(one) for one in waiting))
        late, more = await _beyond(server, data, cap, max(16, round(1000 * scale)))
        found = [*await replies, *await asyncio.gather(*(_result(one) for one in more)), *late]
    refused = [reply for reply in found if isinstance(reply, Reply) and reply.status == 429]
    fast = [reply.times[-1] for reply in late if isinstance(reply, Reply) and reply.status == 429]
    rest = [reply for reply in found if not (isinstance(reply, Reply) and reply.status == 429)]
    wrong = [one for one in rest if isinstance(one, Exception) or one.status != 200 or told(one, False) != right]
    report.invariant("requests that wait at most", most <= cap, f"{most:,.0f}", f"<= {cap:,}")
    report.invariant(
        "refused beyond the cap, each with Retry-After", _all_say_when(refused), f"{len(refused):,}", "> 0"
    )
    report.invariant("accepted and not finished with their text", not wrong, f"{len(wrong)} of {len(rest):,}", "0")
    report.invariant("refused of those asked one by one", len(fast) > 0, f"{len(fast):,} of {len(late):,}", "> 0")
    report.target("429 beyond the cap, p99", 1000 * quantile(fast, 0.99), 50, "ms")
    health_target(report, "all the time", health, 100)
    report.target("memory of a queued request", grown / KB, 32, "KB")
    await at_rest(report, server)


async def _fill(server: Server, data: bytes, count: int) -> list[Exchange]:
    found: list[Exchange] = []
    for at in range(0, count, 128):
        some = (send(server.address, data) for _ in range(min(128, count - at)))
        found += await asyncio.gather(*some)
    return found


def ended_in(now: Mapping[str, float]) -> float:
    """Requests that have ended or were refused, by the server's metrics."""
    return now.get("requests_total", 0.0) + now.get("rejections_total", 0.0)


async def _taken(server: Server, sent: int, cap: int, ended: float) -> float:
    """Wait until the server has taken all that was sent; the most requests that waited meanwhile."""
    most = 0.0
    while True:
        now = await asyncio.to_thread(server.metrics)
        most = max(most, now["requests_waiting"])
        gone = ended_in(now) - ended
        if most >= cap or now["requests_waiting"] + now["requests_running"] + gone >= sent - 64:
            return most
        await asyncio.sleep(0.02)


async def _beyond(server: Server, data: bytes, cap: int, count: int) -> tuple[list[Any], list[Exchange]]:
    """Ask on at an even pace, whatever the answers, and fill the queue up again where it has room.

    Returns the replies, or errors, and the requests that filled it.
    """
    tasks, more = [], []
    for _ in range(count):
        if (await asyncio.to_thread(server.metrics))["requests_waiting"] < cap:
            more += await _fill(server, data, 16)
        tasks.append(asyncio.create_task(_asked(server.address, data)))
        await asyncio.sleep(0.004)
    return list(await asyncio.gather(*tasks)), more


async def _asked(address: Address, data: bytes) -> Any:
    try:
        return await (await send(address, data)).reply()
    except OSError as error:
        return error


async def _result(exchange: Exchange) -> Any:
    try:
        return await exchange.reply()
    except OSError as error:
        return error


def _all_say_when(refused: Sequence[Reply]) -> bool:
    return bool(refused) and all(reply.headers.get("retry-after", "").isdigit() for reply in refused)


def health_target(report: Report, when: str, health: Health, limit_ms: float) -> None:
    """/health always says that the engine is well, soon."""
    report.invariant(f"/health other than 200, {when}", not health.failures, health.failures, "0")
    report.target(f"/health p99, {when}", 1000 * quantile(health.seconds, 0.99), limit_ms, "ms")
    report.figure(f"/health worst of {len(health.seconds):,}", f"{1000 * max(health.seconds):.0f} ms")


@dataclass(frozen=True)
class Stopped:
    """The end of a server that was told to end."""

    found: Sequence[Any]
    status: int | None


async def stop(server: Server, report: Report, scale: float) -> None:
    """SIGTERM while requests run and wait, one of them with prompts that have not come to the queue yet."""
    count, length = max(8, round(128 * scale)), longest(int(server.metrics()["pages"]))
    long = [fixed(min(1900, length - 32), at % 2 == 0, f"Day {at}") for at in range(8)]  # these are open for long
    many = Wanted("/v1/completions", {**fixed(16).body, "prompt": ["One day"] * MANY}, True)
    wanted = [*long, *mixed(count, 3, length), many]
    undisturbed = await texts_of(server, [one.whole() for one in wanted], 1)
    ended = ended_in(server.metrics())
    tasks = asyncio.create_task(texts_of(server, wanted, len(wanted)))
    while True:  # until every request is accepted, though some may have ended
        now = await asyncio.to_thread(server.metrics)
        gone = ended_in(now) - ended
        if now["requests_waiting"] + now["requests_running"] + gone >= len(wanted) - 1 + ABREAST or tasks.done():
            break
    open_then = now["requests_waiting"] + now["requests_running"]
    began = time.monotonic()
    server.terminate()
    found = await tasks
    status = await asyncio.to_thread(server.wait)
    report.invariant("prompts open at SIGTERM", open_then > 0, f"{open_then:.0f}, of {len(wanted)} replies", "> 0")
    same_texts(report, found, undisturbed)
    report.invariant("exit status", status == 0, status, "0")
    report.figure("from SIGTERM to the end", f"{time.monotonic() - began:.2f} s")


async def soak(server: Server, report: Report, requests: int, seconds: float, distinct: int = 256) -> None:
    """Mixed requests for a long time, `distinct` ones over and over: memory and speed stay as they are."""
    wanted = mixed(distinct, 4, longest(int(server.metrics()["pages"])) // 2)
    right = await texts_of(server, [one.whole() for one in wanted], 1)
    log = _Soak([], [], [])
    began, draws = time.monotonic(), random.Random(5)
    until = began + seconds

    async def client() -> None:
        while len(log.times) < requests and time.monotonic() < until:
            at = draws.randrange(len(wanted))
            sent = time.perf_counter()
            [text] = await texts_of(server, [wanted[at]], 1)
            log.times.append(time.perf_counter() - sent)
            if text != right[at]:
                log.wrong.append((text, right[at]))
            spent = time.monotonic() - began
            if spent >= len(log.memory) * seconds / 500:
                log.memory.append((spent, server.memory()))

    await asyncio.gather(*(client() for _ in range(16)))
    took = time.monotonic() - began
    report.figure(f"{len(log.times):,} requests", f"{took:.0f} s, {len(log.times) / took:.1f} a second")
    same_texts(report, *([pair[at] for pair in log.wrong] for at in range(2)))
    log.tell(report)
    await at_rest(report, server)


@dataclass
class _Soak:
    """The measurements of a soak. memory: (seconds, bytes). wrong: (text or error, undisturbed text)."""

    times: list[float]
    memory: list[tuple[float, int]]
    wrong: list[tuple[Any, Any]]

    def tell(self, report: Report) -> None:
        later = self.memory[len(self.memory) // 2 :]  # the first half fills caches
        if len(later) > 2:
            report.target("slope of memory (RssAnon + swap), second half", 3600 * slope(later) / MB, 1, "MB/h")
            tenths = self.memory[:: max(1, len(self.memory) // 10)]
            report.figure(
                "memory at each tenth, and the end",
                "".join(f"{one / MB:.1f} " for _, one in (*tenths, self.memory[-1])),
            )
        quarter = len(self.times) // 4
        early, late = self.times[quarter : 2 * quarter], self.times[-quarter:]
        if quarter:
            report.target("p50, last quarter over the second", 100 * (median(late) / median(early) - 1), 5, "%")
            p50, p99 = (1000 * quantile(self.times, share) for share in (0.5, 0.99))
            report.figure("p50, p99", f"{p50:.1f}, {p99:.1f} ms")


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the least squares' line."""
    x = sum(at for at, _ in points) / len(points)
    y = sum(value for _, value in points) / len(points)
    spread = sum((at - x) ** 2 for at, _ in points)
    return sum((at - x) * (value - y) for at, value in points) / spread if spread else 0.0


def about() -> str:
    """The machine, for the head of a table."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()
    return f"{cores} cores, load {load[0]:.1f} (1 min), {load[2]:.1f} (15 min)"
