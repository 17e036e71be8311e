"""Access control before the app sees a request: Host, Origin, key, and the sizes of headers and bodies.

Any web page can reach a local socket, but its request has its Origin or Sec-Fetch-Site, and a DNS name rebound to this
address has its own Host. With keys set, all routes but `OPEN` require one. `OPEN` routes read no body.
"""

import asyncio
import base64
import hashlib
import hmac
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenwright.errors import RequestError
from tokenwright.serve.http.api import About, ClientGone, RefusedRequest, close_reason
from tokenwright.serve.service.admission import Quota
from tokenwright.serve.service.types import Caller, Problem

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
Answer = Callable[[Scope, Problem, str], App]  # (scope, problem, request id)

MOST_BODY = 16 * 2**20  # bytes
MOST_HEADERS = 128
MOST_HEADER_BYTES = 32 * 2**10
MOST_HELD = 16  # bodies of the largest size that all requests together may hold
AT_ONCE = 2  # requests admitted in one iteration of the event loop
BODY_S = 30.0
OPEN = frozenset(("/health", "/v1/health", "/ping", "/ready", "/version"))
# Replies are no scripts, pages load nothing from elsewhere, and only local and allowed pages may frame them.
NOSNIFF = (b"x-content-type-options", b"nosniff")
LOADS = "default-src 'self'; img-src 'self' data: blob:; style-src 'self'; object-src 'none'"
FRAMES = "base-uri 'none'; form-action 'self'; frame-ancestors 'self' http://localhost:* http://127.0.0.1:*"
EXPOSED = b"Retry-After, Server-Timing, X-Request-Id, Request-Id, X-Tokenwright-Ignored, X-Tokenwright-Cache"
STRANGER = Caller(models=frozenset(("",)))  # no key, although keys are in use: sees no model
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Throttle:
    """Admits AT_ONCE requests per iteration of the event loop, so a crowd does not delay /health and tokens."""

    def __init__(self) -> None:
        self._left = AT_ONCE
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def enter(self) -> None:
        if self._left:
            self._left -= 1
            self._turn_soon()
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def _turn_soon(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turning, self._left = False, AT_ONCE
        while self._left and self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                self._left -= 1
        if self._left < AT_ONCE:
            self._turn_soon()


class ApiKeys:
    """The hashed keys of lines "KEY" or "KEY model,model". Without keys, none is required. Raises RequestError."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._callers: list[tuple[bytes, Caller]] = []
        for line in dict.fromkeys(keys):
            key, _, models = line.partition(" ")
            if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
                raise RequestError("an API key must be at least 8 visible ASCII characters; take one from a generator")
            digest = _digest(key)
            salt = hashlib.sha256(b"tokenwright prefix salt " + digest).hexdigest()
            named = frozenset(name for name in models.replace(",", " ").split() if name)
            self._callers.append((digest, Caller(f"key-{digest.hex()[:8]}", salt, named)))
        if len({digest for digest, _ in self._callers}) < len(self._callers):
            raise RequestError("an API key is given twice with different models; give it once with all of them")

    def __len__(self) -> int:
        return len(self._callers)

    @property
    def models(self) -> frozenset[str]:
        return frozenset(name for _, caller in self._callers for name in caller.models)

    def caller(self, key: str | None) -> Caller | None:
        """The caller of a key, or None. Compares in constant time."""
        digest, found = _digest(key or ""), None
        for known, caller in self._callers:
            if hmac.compare_digest(digest, known):
                found = caller
        return found if key else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Path) -> list[str]:
    """Read a file of keys, one a line, without blank lines and lines that begin with #. Raises RequestError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RequestError(f"--api-key-file {path} cannot be read: {reason}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise RequestError(f"--api-key-file {path} has no keys; write one a line")
    return keys


@dataclass(frozen=True, slots=True)
class Policy:
    """The permitted callers. A name may have any port: tunnels change it, and no page chooses the name in its Host."""

    hosts: frozenset[str] | None  # this server's names; None: any Host
    keys: ApiKeys
    origins: frozenset[str] = frozenset()  # of foreign pages
    body: int = MOST_BODY  # bytes

    @classmethod
    def of(cls, hosts: Iterable[str] | None, keys: Iterable[str] = (), **more: Any) -> "Policy":
        named = None if hosts is None else frozenset(map(_name_of, hosts))
        return cls(named, ApiKeys(keys), **more)


class Guard:
    """Enforces the policy, and reads whole bodies. full(key): the problem with which `queued` paths are refused."""

    def __init__(
        self,
        app: App,
        policy: Policy,
        answer: Answer,
        queued: frozenset[str] = frozenset(),
        full: Callable[[str], Problem | None] = lambda _: None,
    ) -> None:
        self.app = app
        self.policy = policy
        self.answer = answer
        self.full = full
        self.queued = queued
        self.bodies = Quota(MOST_HELD * policy.body, len(policy.keys))
        self._throttle = Throttle()
        framed = "; ".join((LOADS, " ".join((FRAMES, *sorted(policy.origins)))))
        self._always: Headers = [NOSNIFF, (b"content-security-policy", framed.encode("latin-1", "replace"))]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        problem = self._problem(scope)
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send, problem)
            return
        send = _with_headers(send, self._headers_of(scope))
        if problem is not None:
            await self._refuse(scope, receive, send, problem)
        elif self._preflight(scope):
            await _allow(scope, send)
        elif scope["path"] in OPEN:
            await self.app(scope, _unread(receive), send)
        else:
            await self._bounded(scope, receive, send)

    async def _socket(self, scope: Scope, receive: Receive, send: Send, problem: Problem | None) -> None:
        if problem is None:
            await self.app(scope, receive, send)
        else:
            await receive()  # ASGI: receive the handshake before refusing it
            await send(
                {"type": "websocket.close", "code": 4000 + problem.status, "reason": close_reason(problem.message)}
            )

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, problem: Problem) -> None:
        await self.answer(scope, problem, _about(scope).request_id)(scope, receive, send)

    def _headers_of(self, scope: Scope) -> Headers:
        found, origin = list(self._always), _header(scope, b"origin")
        if origin in self.policy.origins:
            found += _shared(origin or "")
        size, coding = (_header(scope, name) for name in (b"content-length", b"transfer-encoding"))
        if scope["path"] in OPEN and (coding is not None or size not in (None, "0")):
            found.append((b"connection", b"close"))  # so uvicorn reads no more of the body
        return found

    def _problem(self, scope: Scope) -> Problem | None:
        headers = scope["headers"]
        if len(headers) > MOST_HEADERS or sum(len(name) + len(value) for name, value in headers) > MOST_HEADER_BYTES:
            return Problem(
                431, "size", f"there are more than {MOST_HEADERS} headers, or {MOST_HEADER_BYTES} bytes of them"
            )
        hosts = _headers(scope, b"host")
        known = self.policy.hosts
        if not hosts and scope["http_version"] == "1.0":  # not a browser
            hosts = [""]
        elif len(hosts) != 1 or (known is not None and _name_of(hosts[0]) not in known):
            names = ", ".join(sorted(known or ())) or "one name"
            return Problem(403, "forbidden", f"this server answers as {names} only; open one of these")
        origins = set(_headers(scope, b"origin"))
        foreign = not origins and _header(scope, b"sec-fetch-site") in ("cross-site", "same-site")
        linked = _header(scope, b"sec-fetch-mode") == "navigate"
        if (foreign and not linked) or not origins <= _own_origins(hosts[0], known) | self.policy.origins:
            return Problem(403, "forbidden", "pages of other origins may not call this server")
        return self._key_problem(scope)

    def _key_problem(self, scope: Scope) -> Problem | None:
        if not self.policy.keys or self._preflight(scope):
            return None
        caller = self.policy.keys.caller(_key(scope))
        if caller is None and scope["path"] not in OPEN:
            why = "this API key is unknown" if _key(scope) else "an API key is required"
            return Problem(401, "key", f"{why}; send it as the header Authorization: Bearer KEY")
        _about(scope).caller = caller or STRANGER
        return None

    def _preflight(self, scope: Scope) -> bool:
        """Whether this is a browser's CORS preflight for an allowed origin, which has no key."""
        asks = scope.get("method") == "OPTIONS" and _header(scope, b"access-control-request-method") is not None
        return asks and _header(scope, b"origin") in self.policy.origins

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and scope["path"] in self.queued:
            await self._throttle.enter()
            if (busy := self.full(_about(scope).caller.key)) is not None:
                await self._refuse(scope, receive, send, busy)
                return
        body = _Body(self, scope, receive)
        _about(scope).hold = body.hold
        try:
            problem = await body.read()
            if problem is None:
                await self.app(scope, body.receive, send)
            else:
                await self._refuse(scope, receive, send, problem)
        except ClientGone:
            return
        finally:
            self.bodies.remove(body.key, body.size)


def _unread(receive: Receive) -> Receive:
    """An ASGI `receive` that returns an empty body, then the connection's further messages."""
    left: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def without_body() -> Message:
        return left.pop() if left else await receive()

    return without_body


def _with_headers(send: Send, more: Headers) -> Send:

    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *more]
        await send(message)

    return with_headers


def _shared(origin: str) -> Headers:
    allowed = (b"access-control-allow-origin", origin.encode("latin-1"))
    return [allowed, (b"access-control-expose-headers", EXPOSED), (b"vary", b"origin")]


async def _allow(scope: Scope, send: Send) -> None:
    wanted = _header(scope, b"access-control-request-headers") or "authorization, content-type"
    headers = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", wanted.encode("latin-1")),
    ]
    if _header(scope, b"access-control-request-private-network") == "true":  # a public page asks for a local address
        headers.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


class _Body:
    __slots__ = ("_declared", "_guard", "_parts", "_receive", "key", "size")

    def __init__(self, guard: Guard, scope: Scope, receive: Receive) -> None:
        self.key = _about(scope).caller.key
        self.size = 0
        self._guard = guard
        self._receive = receive
        self._parts: list[bytes] | None = []
        said = _header(scope, b"content-length")
        self._declared = int(said[:20]) if said is not None and said.isdecimal() else 0

    async def read(self) -> Problem | None:
        """Read the whole body. Returns a problem if it is refused. Raises ClientGone."""
        try:
            async with asyncio.timeout(BODY_S):
                return await self._read([])
        except TimeoutError:
            return Problem(408, "invalid", f"the body has not come within {BODY_S:g} s")

    async def _read(self, parts: list[bytes]) -> Problem | None:
        guard, most, more = self._guard, self._guard.policy.body, True
        while more:
            if max(self._declared, self.size) > most:
                return self._too_large()
            if not guard.bodies.fits(self.key, max(0, self._declared - self.size)):
                return self._too_many()
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            self.size += len(parts[-1])
            guard.bodies.add(self.key, len(parts[-1]))
            more = message.get("more_body", False)
        self._parts = parts
        return None if self.size <= most else self._too_large()

    def hold(self, more: int) -> None:
        """Count stored bytes that a body refers to, until its request is answered. Raises RefusedRequest."""
        if not self._guard.bodies.fits(self.key, more):
            raise RefusedRequest(self._too_many())
        self.size += more
        self._guard.bodies.add(self.key, more)

    def _too_many(self) -> Problem:
        why = f"requests of {self._guard.bodies.used:,} bytes in all are being answered; try again in a second"
        return Problem(429, "busy", why, retry_after_s=1)

    def _too_large(self) -> Problem:
        return Problem(413, "size", f"the body is larger than {self._guard.policy.body} bytes")

    async def receive(self) -> Message:
        if self._parts is None:
            return await self._receive()
        body, self._parts = b"".join(self._parts), None
        return {"type": "http.request", "body": body, "more_body": False}


def _about(scope: Scope) -> About:
    found = scope.setdefault("tokenwright", About(""))
    assert isinstance(found, About), "a middleware set it"
    return found


def _headers(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").lower() for key, value in scope["headers"] if key == name]


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def _name_of(host: str) -> str:
    name, _, port = host.lower().rpartition(":")
    return name if port.isdigit() else host.lower()


def _own_origins(host: str, known: frozenset[str] | None) -> set[str]:
    """The origins of this server's pages at `host`; loopback names have no TLS."""
    plain = known is not None and _name_of(host) in _LOOPBACK
    return {f"http://{host}"} if plain else {f"http://{host}", f"https://{host}"}


def _key(scope: Scope) -> str | None:
    """The key: a bearer token, Anthropic's header, or the password that browsers ask for."""
    scheme, _, value = (_header(scope, b"authorization") or "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode("utf-8").partition(":")[2]
        except ValueError:  # no base64, or no text
            return None
    return _header(scope, b"x-api-key")
