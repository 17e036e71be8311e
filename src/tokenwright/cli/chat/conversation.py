"""A conversation: its messages, the token ids of its answers, and its file.

An answer keeps its generated ids and exact text, so the next prompt begins with the tokens in the KV cache.
"""

import json
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokenwright.errors import RequestError
from tokenwright.regular_file import read_regular

if TYPE_CHECKING:
    from tokenwright.llm.outputs import Completion
    from tokenwright.text import Tokenizer

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Conversation:
    messages: Messages = field(default_factory=list)
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)  # token ids, by the index of the message
    held: int = 0  # leading tokens whose K and V were computed

    @property
    def system(self) -> Messages:
        return [message for message in self.messages[:1] if message["role"] == "system"]

    @property
    def last_question(self) -> str | None:
        return next((one["content"] for one in reversed(self.messages) if one["role"] == "user"), None)

    def with_system(self, text: str) -> "Conversation":
        """Set the system message; '' removes it."""
        return self._spliced(0, len(self.system), [{"role": "system", "content": text}] if text else [])

    def with_turn(self, question: str, answer: str, ids: tuple[int, ...], held: int) -> "Conversation":
        turn = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        answers = {**self.answers, len(self.messages) + 1: ids}
        return Conversation([*self.messages, *turn], answers, held)

    def without_last_turn(self) -> "Conversation":
        """Drop the user's last message and all after it. Raises RequestError."""
        places = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
        if not places:
            raise RequestError("there is no message yet")
        return self._spliced(places[-1], len(self.messages), [])

    def without_first_turn(self) -> "Conversation | None":
        first = len(self.system)
        if len(self.messages) == first:
            return None
        later = (at for at in range(first + 1, len(self.messages)) if self.messages[at]["role"] == "user")
        return self._spliced(first, next(later, len(self.messages)), [])

    def cleared(self) -> "Conversation":
        return Conversation(self.system)

    def _spliced(self, start: int, stop: int, messages: Messages) -> "Conversation":
        moved = start + len(messages) - stop
        answers = {at: ids for at, ids in self.answers.items() if at < start}
        answers |= {at + moved: ids for at, ids in self.answers.items() if at >= stop}
        return replace(self, messages=[*self.messages[:start], *messages, *self.messages[stop:]], answers=answers)


def answer_text(done: "Completion", tokenizer: "Tokenizer") -> str:
    """An answer's exact text, with the leading space that SentencePiece drops, and without its stop string."""
    pieces = [tokenizer.token_bytes(token, first=False) or b"" for token in done.token_ids]
    exact = b"".join(pieces).decode("utf-8", errors="replace")
    return exact if exact.strip() == done.text.strip() else done.text


def load(path: Path) -> Conversation:
    from tokenwright.llm.chat.seen_pictures import with_pictures
    from tokenwright.text.messages import PICTURES, check_messages, text_of

    try:
        messages = json.loads(read_regular(path))
    except OSError as error:
        raise RequestError(f"the conversation cannot be read from {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is no conversation: it is not JSON ({error})") from error
    try:
        each = messages if isinstance(messages, list) else ()
        seen = [with_pictures(one) if isinstance(one, dict) else one for one in each] or messages
        texts = [{**one, "content": text_of(one["content"])} for one in check_messages(seen)]
        return Conversation([messages[at] if PICTURES in one else one for at, one in enumerate(texts)])
    except RequestError as error:
        raise RequestError(f"{path} is no conversation: {error}") from error


def save(talk: Conversation, path: Path) -> None:
    """Write the messages atomically. Raises RequestError."""
    draft: Path | None = None
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            draft = Path(file.name)
            json.dump(talk.messages, file, ensure_ascii=False, indent=1)
            file.write("\n")
        draft.replace(path)
        draft = None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RequestError(f"the conversation cannot be saved to {path}: {reason}") from error
    finally:
        if draft is not None:
            draft.unlink(missing_ok=True)


def counted(talk: Conversation) -> str:
    count = len(talk.messages)
    return f"{count} message{'s' if count != 1 else ''}"
