"""The part `hostile` of `reliability.py`: slow and malicious clients, with /health beside them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.serving.http_client import Exchange, Reply, ask, packed, send
from benchmarks.serving.reliability_parts import at_rest, health_target, in_turns, same_text, texts_of
from benchmarks.serving.served import Health, Server
from benchmarks.serving.traffic import NAME, fixed
from benchmarks.serving.verdicts import Report

HEALTH_MS = 250
Attack = Callable[[Server, float], Awaitable[tuple[bool, str]]]  # (server, scale) -> whether it was met well, and how


async def hostile(server: Server, report: Report, scale: float) -> None:
    """One attack after another; after each the next reply is right."""
    [before] = await texts_of(server, [fixed(48)], 1)
    for name, attack in ATTACKS.items():
        with Health(server) as health:
            met, how = await attack(server, scale)
        report.invariant(name, met, how)
        health_target(report, name, health, HEALTH_MS)
        await same_text(report, server, before)
    await at_rest(report, server)


async def slow_readers(server: Server, scale: float) -> tuple[bool, str]:
    """Streams whose clients read a byte at a time, ten a second; another client is served meanwhile."""
    seconds = 5 * scale
    data = packed(server.address, "/v1/completions", fixed(1900, stream=True).sent())
    streams = [await send(server.address, data, receive_buffer=1024) for _ in range(8)]
    readers = [asyncio.create_task(_read_slowly(one)) for one in streams]
    [other] = await texts_of(server, [fixed(8)], 1)
    await asyncio.sleep(seconds)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    for one in streams:
        one.close()
    return isinstance(other, tuple), f"8 for {seconds:.1f} s; another client is served: {isinstance(other, tuple)}"


async def _read_slowly(exchange: Exchange) -> None:
    while await exchange.reader.read(1):
        await asyncio.sleep(0.1)


async def slow_loris(server: Server, scale: float) -> tuple[bool, str]:
    """Connections that send their header, or their body, a byte at a time and never end."""
    count, seconds = max(8, round(400 * scale)), 5 * scale
    whole = packed(server.address, "/v1/completions", fixed(8).sent())
    heads = [await send(server.address, whole[:40]) for _ in range(count // 2)]
    bodies = [await send(server.address, whole[:-20]) for _ in range(count - count // 2)]
    [other] = await texts_of(server, [fixed(8)], 1)
    await asyncio.sleep(seconds)
    for one in [*heads, *bodies]:
        one.close()
    return isinstance(
        other, tuple
    ), f"{count} for {seconds:.1f} s; another client is served: {isinstance(other, tuple)}"


async def large_bodies(server: Server, scale: float) -> tuple[bool, str]:
    """Bodies of 27 MB, and bodies just under the limit, whose prompts are far too long."""
    count = max(1, round(8 * scale))
    large = b'{"model":"' + NAME.encode() + b'","prompt":"' + b"a b " * (27 * 2**18) + b'"}'
    small = b'{"model":"' + NAME.encode() + b'","prompt":"' + b"a b " * (39 * 2**18 // 10) + b'"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: %s:%d\r\ncontent-type: application/json\r\nconnection: close\r\n"
    head %= (server.address[0].encode(), server.address[1])
    chunked = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(large) + large + b"\r\n0\r\n\r\n"
    told, kept = (head + b"content-length: %d\r\n\r\n" % len(body) + body for body in (large, small))
    replies = await in_turns([lambda d=data: _status(server, d) for data in (told, chunked, kept)] * count)
    met = all(isinstance(one, OSError) or one in (400, 413) for one in replies)  # an OSError: it closed while we sent
    return met, f"{3 * count} bodies: {_counted(replies)}"


async def _status(server: Server, data: bytes) -> int:
    exchange = await send(server.address, b"")
    try:
        exchange.write(data)
        status, _ = await exchange.head()
        return status
    finally:
        exchange.close()


async def crowd(server: Server, scale: float) -> tuple[bool, str]:
    """1,280 requests at once: each is served or told to come again."""
    body = fixed(8).sent()
    count = max(8, round(1280 * scale))
    replies = await in_turns([lambda: ask(server.address, "/v1/completions", body)] * count, count)
    statuses = [one.status if isinstance(one, Reply) else one for one in replies]
    return all(one in (200, 429) for one in statuses), _counted(statuses)


async def schema_bombs(server: Server, scale: float) -> tuple[bool, str]:
    """Schemas that cost their compilers far more than they cost their senders: refused, or served within the budget."""
    bombs = BOMBS * max(1, round(4 * scale))

    async def one(schema: Any) -> int:
        body = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": schema}}
        return (await ask(server.address, "/v1/chat/completions", body)).status

    statuses = await in_turns([lambda s=schema: one(s) for schema in bombs])  # type: ignore[misc]
    return all(isinstance(one, int) and one in (200, 400, 422) for one in statuses), _counted(statuses)


def _nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for at in range(depth):
        inner = json.dumps(schema)
        parts = [{"type": "object", "properties": {f"a{at}{key}": {"$ref": "#/$defs/x"}}} for key in range(3)]
        schema = {"oneOf": [json.loads(inner), *parts]}
    return schema | {"$defs": {"x": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/x"}}]}}}


BOMBS: list[Any] = [
    _nested(30),
    {"type": "string", "pattern": "(a{1,100}){1,100}(b{1,100}){1,100}"},
    {"type": "string", "pattern": "((a|b|ab)+)+$" * 50},
    {"enum": [f"value {at}" for at in range(10_000)]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000},
    {"type": "object", "properties": {f"p{at}": {"type": "string", "maxLength": 5000} for at in range(300)}},
]


def _counted(found: list[Any]) -> str:
    names = [type(one).__name__ if isinstance(one, Exception) else str(one) for one in found]
    return ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))


ATTACKS: dict[str, Attack] = {
    "slow readers": slow_readers,
    "slow-loris": slow_loris,
    "27 MB bodies": large_bodies,
    "1,280 at once": crowd,
    "schema bombs": schema_bombs,
}
