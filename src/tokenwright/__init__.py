"""Tokenwright runs a language model one token at a time, and shows every step of it.

    from tokenwright import LLM, SamplingParams

    with LLM("stories") as llm:
        for piece in llm.stream("Once upon a time", SamplingParams(temperature=0.8)):
            print(piece.text, end="", flush=True)

Public names load on first use, so that a part of the package does not load all of it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenwright.errors import (
        CacheFileError,
        CapacityError,
        CheckpointError,
        ContextError,
        EngineError,
        RequestError,
        TokenwrightError,
    )
    from tokenwright.llm.llm import LLM
    from tokenwright.llm.outputs import Completion, Piece
    from tokenwright.llm.run_trace import show
    from tokenwright.planner import plan
    from tokenwright.sampling_params import Grammar, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM", "CacheFileError", "CapacityError", "CheckpointError", "Completion", "ContextError", "EngineError", "Grammar",
    "Piece", "RequestError", "SamplingParams", "TokenwrightError", "plan", "show",
]  # fmt: skip

_HOMES = {
    "LLM": "tokenwright.llm.llm",
    "Completion": "tokenwright.llm.outputs",
    "Piece": "tokenwright.llm.outputs",
    "SamplingParams": "tokenwright.sampling_params",
    "Grammar": "tokenwright.sampling_params",
    "plan": "tokenwright.planner",
    "show": "tokenwright.llm.run_trace",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tokenwright.importing import uncollected_imports

    with uncollected_imports():
        value = getattr(importlib.import_module(_HOMES.get(name, "tokenwright.errors")), name)
    globals()[name] = value  # later look-ups do not call __getattr__
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
