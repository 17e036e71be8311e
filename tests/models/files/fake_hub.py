"""As much of the Hugging Face hub's protocol as huggingface_hub needs to fetch a model, served on this machine.

`FakeHub(repositories)` serves {owner/name: {branch: {file: bytes}}} and remembers the requests. A name in
`gated` answers as a gated model does without a token; `broken[name]` is the status of its files of weights. Of a name
in `stalling` only half of the weights come: then `stalled` is set, and the rest waits for `go_on`.
"""

import hashlib
import json
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from types import TracebackType
from typing import ClassVar
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


def commit_of(name: str, branch: str) -> str:
    return hashlib.sha1(f"{name}@{branch}".encode()).hexdigest()


class FakeHub:
    def __init__(self, repositories: dict[str, dict[str, Files]]) -> None:
        self.repositories = repositories
        self.gated: set[str] = set()
        self.broken: dict[str, int] = {}
        self.stalling: set[str] = set()
        self.stalled, self.go_on = Event(), Event()
        self.requests: list[str] = []  # "GET /path"
        self.tokens: list[str] = []

        class Handler(_Handler):
            hub = self

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FakeHub":
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def fetched(self) -> set[str]:
        """The files whose contents were asked for."""
        return {one.rsplit("/", 1)[1] for one in self.requests if one.startswith("GET") and "/resolve/" in one}

    def files(self, name: str, revision: str) -> tuple[str, Files] | None:
        """The commit and the files of a branch or a commit."""
        for branch, files in self.repositories[name].items():
            if revision in (branch, commit_of(name, branch)):
                return commit_of(name, branch), files
        return None


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[FakeHub]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.requests.append(f"{self.command} /{path}")
        self.hub.tokens.append(self.headers.get("Authorization", ""))
        parts = path.split("/")
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        name = "/".join(parts[:2])
        if name not in self.hub.repositories:
            if "Bearer" in self.hub.tokens[-1]:
                self._refuse(404, "RepoNotFound", "Repository not found")
            else:  # strangers do not learn whether it exists
                self._refuse(401, "", "Invalid username or password.")
        elif name in self.hub.gated and "Bearer" not in self.hub.tokens[-1]:
            self._refuse(401, "GatedRepo", f"Access to model {name} is restricted.")
        elif (found := self.hub.files(name, parts[3] if len(parts) > 3 else "main")) is None:
            self._refuse(404, "RevisionNotFound", "Invalid rev id")
        elif is_api:
            self._api(name, parts[2], *found)
        else:
            self._file(name, "/".join(parts[4:]), *found)

    def _api(self, name: str, what: str, commit: str, files: Files) -> None:
        if what == "tree":
            listing = [
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for path, data in files.items()
            ]
            self._send(200, {"Content-Type": "application/json"}, json.dumps(listing).encode())
        else:
            siblings = [{"rfilename": path} for path in files]
            info = {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": False}
            self._send(200, {"Content-Type": "application/json"}, json.dumps(info).encode())

    def _file(self, name: str, path: str, commit: str, files: Files) -> None:
        if name in self.hub.broken and path.endswith(".safetensors"):
            self._refuse(self.hub.broken[name], "", "disk on fire")
        elif path not in files:
            self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            data = files[path]
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
            stalls = name in self.hub.stalling and path.endswith(".safetensors") and self.command == "GET"
            self._send(200, headers | {"Content-Type": "application/octet-stream"}, data, stalls=stalls)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, {"X-Error-Code": code, "X-Error-Message": message} if code else {}, b"{}")

    def _send(self, status: int, headers: dict[str, str], body: bytes, *, stalls: bool = False) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if stalls:
            self.wfile.write(body[: len(body) // 2])
            self.hub.stalled.set()
            self.hub.go_on.wait()
            with suppress(OSError):  # the client was killed
                self.wfile.write(body[len(body) // 2 :])
        elif self.command == "GET":
            self.wfile.write(body)
