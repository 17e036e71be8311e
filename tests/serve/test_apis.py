"""`serve --apis`: the server has the routes of the APIs that it is told, and says of the others that it lacks them."""

import json
import subprocess
import sys
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tokenwright import RequestError
from tokenwright.serve.app import APIS, Served, apis_named, make_app
from tokenwright.serve.service.model_host import ModelHost

OPERATIONS = {"/health", "/v1/health", "/ping", "/ready", "/version", "/metrics"}
ASKED = """
import json, sys
from fastapi.testclient import TestClient
from tokenwright.__main__ import main
from tokenwright.serve.service import model_host
from tokenwright.serve.transport import server

class Asked:
    def __init__(self, app, *_):
        self.app = app

    def keep(self, listener):
        client = TestClient(self.app, base_url="http://127.0.0.1:8000")
        paths = ("/v1/models", "/health", "/api/tags", "/v1/messages", "/completion", "/runs/x", "/", "/v1/nothing")
        found = {path: (answer.status_code, answer.text) for path in paths for answer in [client.get(path)]}
        found["POST /v1/messages"] = 0, client.post("/v1/messages", json={}).text
        print(json.dumps([found, [name for name in sys.modules if "explorer" in name]]))

server.Server, model_host.READY_S = Asked, 0.1
sys.argv = ["tokenwright", "serve", "stories", "--port", "0", *FLAGS]
main()
"""


def served(*flags: str) -> tuple[dict[str, Any], list[str]]:
    """The status and the text that a server of the command line answers by path, and the explorer's modules in it."""
    done = subprocess.run([sys.executable, "-c", f"FLAGS = {flags!r}\n{ASKED}"], capture_output=True, text=True)
    assert done.stdout, done.stderr
    found, modules = json.loads(done.stdout.splitlines()[-1])
    return found, modules


def error(found: dict[str, Any], path: str, status: int = 404) -> Any:
    assert found[path][0] in (status, 0), found[path]
    return json.loads(found[path][1])["error"]


def test_a_server_of_one_api_loads_no_explorer_and_refuses_other_paths_in_their_shapes():
    found, modules = served("--apis", "openai")
    assert modules == []
    assert found["/v1/models"][0] == found["/health"][0] == 200
    why = "this server does not serve {0}; start it with --apis {0}"
    assert error(found, "/api/tags") == why.format("ollama"), "Ollama tells an error in words alone"
    for path in ("/v1/messages", "POST /v1/messages"):
        assert json.loads(found[path][1])["type"] == "error"
        assert error(found, path) == {"type": "not_found_error", "message": why.format("anthropic")}
    assert error(found, "/completion")["message"] == why.format("llama_cpp")
    for path in ("/runs/x", "/"):
        assert error(found, path)["kind"] == "bad_request"
    assert error(found, "/v1/nothing")["type"] == "not_found_error"


def test_by_default_all_are_served():
    found, modules = served()
    assert "tokenwright.explorer.table" in modules
    assert found["/api/tags"][0] in (200, 503)  # the model is not loaded
    assert error(found, "/runs/x")["kind"] == "gone"


def test_the_document_has_the_routes_of_the_apis_served():
    for api in APIS:
        host = ModelHost("none", lambda report: None)  # type: ignore[arg-type,return-value]
        app = make_app(host, ["testserver"], None, Served(apis=[api]))
        client = TestClient(app)
        paths = set(client.get("/openapi.json").json()["paths"])
        assert {client.get("/").status_code, client.head("/").status_code} == {200 if api.name == "ollama" else 404}
        own = {path for path in paths if path.startswith(api.prefixes)}
        assert own or api.name == "explorer", api.name
        assert not [path for path in paths - own if "/models" not in path and path not in OPERATIONS], api.name


def test_names_of_apis():
    assert apis_named([]) is APIS
    assert [api.name for api in apis_named(["explorer", "anthropic"])] == ["anthropic", "explorer"]
    with pytest.raises(
        RequestError, match="there is no API 'grpc'; use anthropic, ollama, llama_cpp, openai, explorer"
    ):
        apis_named(["openai", "grpc"])
