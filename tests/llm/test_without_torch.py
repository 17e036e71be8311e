"""The engine, its files, the command line and the server where torch cannot be imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import without_torch
from tests.models.fixtures import make_checkpoint
from tokenwright.backends.native.library import find

pytestmark = pytest.mark.skipif(find() is None, reason="without kernels torch computes")
BLOCKED = without_torch.BLOCK


def run_blocked(code: str, *arguments: str, kernels: str = "native") -> str:
    """What code prints in a process of its own, in which `import torch` fails."""
    environment = os.environ | {"TOKENWRIGHT_KERNELS": kernels, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED + code, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_torch_is_blocked_and_the_plugin_leaves_out_the_files_that_need_it() -> None:
    """At their own top, and through a helper; a fixture that needs torch skips its tests."""
    code = (
        "try:\n    import torch\nexcept ImportError:\n    print('blocked')\n"
        "from pathlib import Path\n"
        "from tests.without_torch import imports_torch\n"
        "for name in sys.argv[1:]: print(imports_torch(Path(name)))\n"
    )
    names = "trace/test_replay", "oracle/test_families", "explorer/test_explorer_chat", "engine/test_engine"
    files = (str(Path(__file__).parents[1] / f"{name}.py") for name in names)
    assert run_blocked(code, *files).split() == ["blocked", "True", "True", "False", "False"]


def test_texts_scores_embeddings_and_files(tmp_path: Path) -> None:
    """Greedy, drawn, by beams, in JSON, embedded; quantised weights and cache; a prefix saved and loaded."""
    code = (
        "import json\n"
        "from tokenwright import LLM, Grammar\n"
        "story = 'Once upon a time'\n"
        "with LLM('stories', pages=400, weights='int8', kv='k=int8,v=int4', trace=True) as llm:\n"
        "    [greedy] = llm.generate(story, temperature=0.0, max_tokens=8)\n"
        "    [drawn] = llm.generate(story, seed=1, top_p=0.9, min_p=0.01, repetition_penalty=1.1, max_tokens=8)\n"
        "    [best] = llm.generate(story, beams=3, temperature=0.0, max_tokens=8)\n"
        "    shape = Grammar.json_schema({'type': 'object', 'properties': {'a': {'type': 'integer'}}})\n"
        "    [made] = llm.generate(story, grammar=shape, temperature=0.0, max_tokens=64, logprobs=2)\n"
        "    print(len(greedy.token_ids), len(drawn.token_ids), len(best.token_ids), len(llm.embed(story)[0]))\n"
        "    print(llm.save_cache(sys.argv[1], llm.tokenizer.encode(story * 20)) == 0)\n"
        "    llm.generate(story * 20, max_tokens=1)\n"
        "    print(llm.save_cache(sys.argv[1], llm.tokenizer.encode(story * 20)) > 0)\n"
        "    logits, cache = llm.model(llm.tokenizer.encode(story))\n"
        "    print(logits.shape[0] == cache.length, logits.dtype)\n"
        "    run = llm.run(story, max_tokens=4)\n"
        "    [frame] = run.step()\n"
        "    print(len(frame.attention.codes) > 0)\n"
        "    run.close()\n"
        "    [seen] = llm.generate(story, temperature=0.0, max_tokens=4, observe=[(1, 2)])\n"
        "    inside = seen.observed\n"
        "    print(abs(inside.attention[1, 2].sum(-1) - 1).max() < 1e-5)\n"
        "    print([int(inside.lens(at)[-1].argmax()) for at in range(4, 8)] == list(seen.token_ids))\n"
        "with LLM('stories', pages=400, weights='int8', kv='k=int8,v=int4') as llm:\n"
        "    print(llm.load_cache(sys.argv[1]) > 0)\n"
    )
    lines = run_blocked(code, str(tmp_path / "story.kv")).splitlines()
    assert lines[0].startswith("8 8 ")
    assert lines[1:] == ["True", "True", "True float32", "True", "True", "True", "True"]


def test_families(tmp_path: Path) -> None:
    kinds = ("qwen3", "gpt2", "mixtral", "deepseek2")
    code = (
        "from tokenwright import LLM\n"
        "for path in sys.argv[1:]:\n"
        "    with LLM(path, pages=64) as llm:\n"
        "        print(len(llm.generate([5, 6, 7], max_tokens=3, ignore_eos=True)[0].token_ids))\n"
    )
    assert run_blocked(code, *(str(make_checkpoint(tmp_path / kind, kind).path) for kind in kinds)) == "3\n" * 4


def test_the_command_line() -> None:
    code = "from tokenwright.__main__ import main\nsys.argv[0] = 'tokenwright'\nmain()\n"
    told = run_blocked(code, "generate", "Once upon a time", "-n", "5", "--temperature", "0")
    assert told.startswith(", there was")
    assert run_blocked(code, "--version").startswith("tokenwright ")


def test_the_server() -> None:
    """Readiness, an answer, and a run of the explorer: its steps, its sampler, and every view of the inside."""
    code = (
        "import time\n"
        "from fastapi.testclient import TestClient\n"
        "from tokenwright import LLM\n"
        "from tokenwright.serve.app import make_app\n"
        "from tokenwright.serve.service.model_host import ModelHost\n"
        "address = '127.0.0.1:8321'\n"
        "host = ModelHost('stories', lambda report: LLM('stories', trace=True, report=report, pages=400))\n"
        "with TestClient(make_app(host, [address], None), base_url=f'http://{address}') as client:\n"
        "    while client.get('/status').json()['phase'] == 'loading': time.sleep(0.01)\n"
        "    asked = {'prompt': 'Once upon', 'max_tokens': 4, 'temperature': 0}\n"
        "    print(client.post('/v1/completions', json=asked).json()['usage']['completion_tokens'])\n"
        "    run = client.post('/runs', json={'prompt': 'Once upon', 'max_tokens': 3, 'seed': 1}).json()['run']\n"
        "    with client.websocket_connect(f'ws://{address}/runs/{run}/stream?since_step=0') as page:\n"
        "        page.send_json({'op': 'play', 'pace': None})\n"
        "        while client.get(f'/runs/{run}/steps/2').status_code != 200: time.sleep(0.01)\n"
        "        print(client.get(f'/runs/{run}/sampler?step=2&top_k=5').json()['kept'])\n"
        "        places = ('block?step=2&layer=1', 'lens?step=2', 'atlas?step=2', 'matrix?step=2&layer=1&head=0',\n"
        "            'way?step=2&layer=1&head=0&position=1')\n"
        "        for place in places: print(client.get(f'/runs/{run}/{place}').status_code)\n"
    )
    lines = run_blocked(code).splitlines()
    assert lines[0] == "4" and 1 <= int(lines[1]) <= 5
    assert lines[2:] == ["200"] * 5


def test_without_kernels_one_sentence_says_what_to_install() -> None:
    code = (
        "from tokenwright import LLM\n"
        "try:\n    LLM('stories')\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    )
    told = run_blocked(code, kernels="reference")
    assert told.count("\n") == 1
    assert told.startswith("RequestError this installation has no native kernels, and without them a model needs torch")
    assert "pip install torch" in told
