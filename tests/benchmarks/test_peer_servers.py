"""Other programs' servers beside ours: started, found to answer, ended; and what is missing is told."""

import os
import sys
from pathlib import Path

import pytest
from peer_servers import PeerServer
from peers_setup import VERSIONS
from served import get

SERVER = """
import http.server, sys

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()

given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert given["--model_alias"] == "here" and given["--interrupt_requests"] == "False"
http.server.HTTPServer((given["--host"], int(given["--port"])), Answers).serve_forever()
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With an environment of llama.cpp, whose server is SERVER, and its model."""
    folder = tmp_path / "peers" / "llama.cpp"
    (folder / "venv" / "bin").mkdir(parents=True)
    (folder / "venv" / "bin" / "python").symlink_to(sys.executable)
    (folder / "llama_cpp").mkdir()
    (folder / "llama_cpp" / "__init__.py").touch()
    (folder / "llama_cpp" / "server.py").write_text(SERVER, encoding="utf-8")
    for name in (VERSIONS, "tiny-q8_0"):
        (folder / name).touch()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return tmp_path


def test_a_server_is_started_and_ended(root: Path) -> None:
    with PeerServer("llama.cpp", "tiny", "here", root) as server:
        assert get(server.address, "/v1/models")[0] == 200
    assert server.process.returncode is not None
    with pytest.raises(ConnectionRefusedError):
        get(server.address, "/v1/models")
    with pytest.raises(ProcessLookupError):
        os.killpg(server.process.pid, 0)


def test_a_server_that_does_not_start_says_why(root: Path) -> None:
    with pytest.raises(SystemExit, match=r"llama\.cpp does not start; .*server\.log ends with: .*AssertionError"):
        PeerServer("llama.cpp", "tiny", "elsewhere", root)


def test_a_server_that_is_not_set_up_says_so(root: Path) -> None:
    with pytest.raises(SystemExit, match=r"vllm: not set up; run benchmarks/peers_setup\.py vllm --shapes tiny"):
        PeerServer("vllm", "tiny", "here", root)
