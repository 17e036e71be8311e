"""A process that is forked while an LLM computes is told so, ends by itself, and leaves the parent in peace."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.fixtures import make_checkpoint

FORKS = 3
SCRIPT = f"""
import os, sys, threading
from tokenwright import LLM, EngineError, Grammar, SamplingParams

def refused(what):
    try:
        what()
    except EngineError as error:
        assert "forked after an LLM was loaded" in str(error) and "spawn" in str(error), error
    else:
        raise AssertionError("it was not refused")

llm = LLM(sys.argv[1], pages=512)
talk = [{{"role": "user", "content": "the"}}]
long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
rendered, right = llm.render(talk), llm.generate("the", long)[0].token_ids
grammar = SamplingParams(grammar=Grammar.regex("[a-z]+"), max_tokens=4)
llm.generate("the", grammar)
over, found = threading.Event(), []

def compute():
    while not over.is_set():
        found.append(llm.generate("the", long)[0].token_ids)
        llm.render(talk)

others = [threading.Thread(target=compute) for _ in range(2)]
for other in others:
    other.start()
for n in range({FORKS}):
    stream = llm.stream("and", long)
    next(stream)
    child = os.fork()
    if not child:
        refused(lambda: llm.generate("the", long))
        refused(lambda: llm.generate("the", grammar))
        refused(lambda: next(iter(llm.stream("the"))))
        refused(lambda: llm.chat(talk))
        refused(lambda: llm.render(talk))
        refused(lambda: llm.embed("the"))
        refused(lambda: llm.save_cache("nowhere", "the"))
        refused(lambda: LLM(sys.argv[1]))
        if n % 2:
            llm.close()
        del stream, llm
        sys.exit(7)  # by way of all finalizers
    assert os.waitpid(child, 0)[1] == 7 << 8
    stream.close()
over.set()
for other in others:
    other.join()
assert all(ids == right for ids in found)
assert llm.render(talk) == rendered
llm.generate("the", grammar)
llm.close()
print("over", len(found) >= 3)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_forks_while_other_threads_compute(tmp_path: Path) -> None:
    path, _ = make_checkpoint(tmp_path / "model", "llama3")
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT, str(path)],
        capture_output=True,
        text=True,
        timeout=300,  # a hang, not a measure
        check=False,
    )
    assert (done.stdout, done.returncode) == ("over True\n", 0), done.stderr[-3000:]
