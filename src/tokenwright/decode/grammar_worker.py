"""The grammar worker: compiles a grammar in a separate process before the engine's process compiles it.

llguidance's fuel bounds most grammars, but not all: the automaton of a `multipleOf` of six digits takes ten seconds
and 400 MB, and a chain of 20,000 rules overflows the stack and crashes the process. So the worker first compiles each
grammar and computes its first mask under limits on CPU time, memory and stack. A grammar that exceeds them ends only
the worker.

The worker imports nothing of the package (torch would take seconds) and is run by its path. On stdin and stdout it
exchanges lines of JSON: first the settings with the tokens' bytes as Latin-1, then one grammar per line; it answers
each with llguidance's error, "" if there is none.
"""

import json
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

CPU_SECONDS = 0.8  # for one grammar
MEMORY_BYTES = 256 * 2**20  # beyond the worker's own memory with the tokens loaded
STACK_BYTES = 2 * 2**20  # a quarter of a thread's default: a grammar that fits here does not overflow the engine's


class _ByteTokens:
    """The tokenizer interface that llguidance requires. Its end token is one past the last id and has no bytes."""

    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = [*tokens, b""]
        self.eos_token_id = len(tokens)

    def __call__(self, text: str | bytes) -> list[int]:  # noqa: ARG002  (llguidance's signature)
        raise AssertionError("grammars are compiled so that no text need be cut into tokens")


def byte_tokenizer(tokens: list[bytes]) -> Any:
    """llguidance's tokenizer of these tokens. b"" is never allowed; the end token has id len(tokens)."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_ByteTokens(tokens)))


def matcher(tokenizer: Any, grammar: str, limits: Mapping[str, Any]) -> Any:
    """llguidance's matcher of a grammar, in its start state or in its error state."""
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits))


def complaint(made: Any) -> str:
    """llguidance's error of a new matcher, once its first mask is computed; "" if there is none."""
    if not made.is_error():
        made.compute_bitmask()
    return str(made.get_error())


def _limit_memory() -> None:
    statm = Path("/proc/self/statm")
    taken = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 2**30
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, taken + MEMORY_BYTES))


def _serve(grammars: IO[bytes], answers: IO[bytes]) -> None:
    """Answer grammars until the input closes."""
    setting = json.loads(grammars.readline())
    sys.path[:] = setting["path"]
    tokenizer = byte_tokenizer([token.encode("latin-1") for token in setting["tokens"]])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory()
    answer = ""
    while True:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        line = grammars.readline()
        if not line:
            return
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the worker
        answer = complaint(matcher(tokenizer, json.loads(line), setting["limits"]))
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()
