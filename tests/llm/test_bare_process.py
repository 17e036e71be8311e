"""The engine where a web page has it: no threads, no processes, and none of the modules that are not there."""

import json
import subprocess
import sys
from pathlib import Path

from tokenwright import LLM, SamplingParams

ABSENT = (
    "fcntl", "resource", "ssl", "_ssl", "ml_dtypes", "fastapi", "starlette", "uvicorn", "pydantic",
    "llguidance", "gguf", "huggingface_hub", "jinja2", "typer", "rich", "multiprocessing", "lzma", "torch",
)  # fmt: skip
PYTHON = Path(__file__).resolve().parents[2] / "web" / "python"  # with a stand-in for tokenizers
CODE = f"""
import json, subprocess, sys, threading
sys.modules.update(dict.fromkeys({ABSENT}))  # any import of them raises ImportError
sys.path.insert(0, {str(PYTHON)!r})
def refuse(*_, **__): raise RuntimeError("can't start new thread")
def no_process(*_, **__): raise OSError("no processes")
threading.Thread.start, subprocess.Popen.__init__ = refuse, no_process
from tokenwright import LLM, SamplingParams
llm = LLM("stories", threads=0, trace=True, pages=80)
"""
WORK = """
sampled = SamplingParams(temperature=0.8, seed=5, max_tokens=20)
greedy = SamplingParams(temperature=0.0, max_tokens=20)
done = llm.generate(["Once upon a time", "Zürich, 42 é  <|end|>\\n"] * 2, [greedy, greedy, sampled, sampled])
found = [[one.token_ids, one.logprobs] for one in done]
with llm.run("The little fox", greedy) as run:
    for _ in range(6):
        run.step()
    run.cache = False
    run.step()
    with llm.fork(run, 3, token=300) as fork:
        fork.step()
        with LLM(llm.llm_engine.loaded, pages=40) as other:
            found += [other.generate("A second engine", greedy)[0].token_ids]
        found += [run.tokens, fork.tokens, run.attention(5, 2, 1).codes, run.heads(4)]
"""


def test_texts_runs_and_forks_are_equal_there() -> None:
    # One thread: the number that such a platform has, by which no other one is started.
    command = [sys.executable, "-c", CODE + WORK + "print(json.dumps(found, default=str))"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    with LLM("stories", trace=True, pages=80) as llm:
        here = {"LLM": LLM, "llm": llm, "SamplingParams": SamplingParams}
        exec(WORK, here)
    assert json.loads(ended.stdout) == json.loads(json.dumps(here["found"], default=str))
