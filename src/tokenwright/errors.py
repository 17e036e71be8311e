"""The errors that a user can see. Each message states what is wrong and what to do about it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class TokenwrightError(Exception):
    """Base of every error that Tokenwright raises on purpose.

    fields: parameters in the message, which the command line replaces by its options.
    """

    def __init__(self, message: str, *fields: str) -> None:
        super().__init__(message)
        self.fields = fields


class RequestError(TokenwrightError, ValueError):
    """A prompt or a parameter that cannot be served as given."""


class ContextError(RequestError):
    """A prompt longer than the model's context; the message gives both lengths in tokens."""

    def __init__(self, tokens: int, context: int) -> None:
        over = tokens - context
        super().__init__(
            f"the prompt has {tokens} tokens, {over} more than the model's context of {context}; "
            f"shorten it by {over} token{'s' if over > 1 else ''}"
        )
        self.tokens, self.context = tokens, context


class CheckpointError(TokenwrightError):
    """A model folder or file that is missing, damaged, or requires ops that we do not have."""


class CacheFileError(TokenwrightError):
    """A saved KV cache that cannot be written or read, is damaged, or belongs to another model or format."""


class CapacityError(TokenwrightError):
    """A model, request or cache file needs more memory than is available or configured."""


class EngineError(TokenwrightError):
    """The engine failed on a request; other requests continue. The message is safe to show to clients.

    completions: from `LLM.generate`, each prompt's Completion in order, or None if it failed.
    """

    def __init__(self, message: str, completions: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.completions = completions


class GrammarError(EngineError):
    """A text's constraints take more than they may, or leave no token; the request is at fault."""


class ReplicaError(EngineError):
    """The replicas that wrote a text died, one after another."""


class WorkerError(EngineError):
    """A process or a GPU that computes the model has gone, and so has the engine."""


def fetch_again(path: Path) -> str:
    """How to replace a damaged file or folder: what is in the hub's cache is not fetched again and must be removed."""
    for part in path.parts:
        kind, _, name = part.partition("--")
        if kind == "models" and name:
            return f"remove it with `tokenwright rm {name.replace('--', '/', 1)}`, and the next use fetches it again"
    return "download it again"
