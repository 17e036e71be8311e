"""The grammar worker: a process that rewrites and compiles what clients send before the engine compiles it.

llguidance's fuel does not bound all grammars: a `multipleOf` of six digits takes ten seconds and 400 MB, and a chain of
20,000 rules overflows the stack. So the worker forks itself for each question, with limits on processor time, memory
and stack. Its stdin and stdout have lines of JSON: first the settings with the tokens' bytes as Latin-1, then questions
{"seconds", "grammar"} or {"seconds", and the arguments of schemas.answered}, and answers {"said", "signal", "seconds"}.
"""

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

MEMORY_BYTES = 256 * 2**20  # beyond the worker's own memory with the tokens loaded
STACK_BYTES = 2 * 2**20  # a quarter of a thread's default: what fits here does not overflow the engine's
LONGEST_SECONDS = 50
_DEPTH = 10_000  # Python calls: more than the stack holds


class _ByteTokens:
    """llguidance's interface. The end token is one past the last id and has no bytes."""

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
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits))


def complaint(made: Any) -> str:
    """llguidance's error of a new matcher, once its first mask is computed; "": none."""
    if not made.is_error():
        made.compute_bitmask()
    return str(made.get_error())


def _complaint_of(tokenizer: Any, limits: Mapping[str, Any], grammar: str) -> str:
    return complaint(matcher(tokenizer, grammar, limits))


def _limit(seconds: float) -> None:
    """Limit this process. SIGPROF ends it after its processor time."""
    import resource

    statm = Path("/proc/self/statm")
    taken = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 2**30
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, taken + MEMORY_BYTES))
    signal.alarm(LONGEST_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _in_fork(answer: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """The answer of a fork with limits; None if the fork ended without one."""
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _limit(seconds)
            with os.fdopen(start, "wb") as pipe:
                pipe.write(json.dumps(answer()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(start)
    with os.fdopen(end, "rb") as pipe:
        said = pipe.read()
    _, status, usage = os.wait4(child, 0)
    ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    whole = status == 0 and said
    return {"said": json.loads(said) if whole else None, "signal": ended, "seconds": usage.ru_utime + usage.ru_stime}


def _serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    setting = json.loads(questions.readline())
    sys.path[:] = setting["path"]
    import resource  # here, for the module is imported everywhere

    from tokenwright.decode import schemas

    tokenizer = byte_tokenizer([token.encode("latin-1") for token in setting.pop("tokens")])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(_DEPTH)
    gc.collect()
    gc.freeze()  # so that a fork shares what is here
    reply: dict[str, Any] = {}
    while True:
        answers.write(json.dumps(reply).encode() + b"\n")
        answers.flush()
        line = questions.readline()
        if not line:
            return
        question = json.loads(line)
        seconds = question.pop("seconds")
        if "grammar" in question:
            reply = _in_fork(partial(_complaint_of, tokenizer, setting["limits"], **question), seconds)
        else:
            reply = _in_fork(partial(schemas.answered, **question), seconds)


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()
