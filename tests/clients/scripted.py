"""A server whose model writes what a script says, for agents that must see their tools called.

    python -m tests.clients.scripted SCRIPT.json [--port 8000]

The model, its cache, its template and its grammar are real; only the choice of the next token is the script's. A script
is a list of turns. A conversation that has tools gets the turn whose number is that of the answers in it so far, and
the last turn for ever after. A conversation without tools gets what `answers` says for a text in its last message, and
otherwise the text of `ASIDE`. A turn is a text, or a call: arguments by the name of the tool, of which the first that
the client has is called:

    [{"Bash": {"command": "echo one"}, "exec_command": {"cmd": "echo one"}}, "All is done."]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.serve.talking import TEMPLATE, Talker, make_talker, running
from tokenwright import LLM
from tokenwright.decode import TextStopChecker
from tokenwright.decode.grammars.grammar_trials import Budget
from tokenwright.serve.app import make_app
from tokenwright.serve.service import service
from tokenwright.serve.service.model_host import ModelHost
from tokenwright.serve.service.preprocess import Prepared, Preprocessor
from tokenwright.serve.service.types import GenerationRequest
from tokenwright.serve.transport.guard import Policy

ROOT = Path(__file__).parents[2]
CONTEXT = 131_072
VOCABULARY = 4_096
PAGES = 3_072  # of 64 tokens: two conversations as long as the context
ASIDE = "A conversation about a small task"
THOUGHT = "I know.\n</think>\n\n"
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
Turn = str | Mapping[str, Mapping[str, Any]]


class Forced:
    """A constraint of decode that lets a text be these ids only."""

    def __init__(self, ids: Sequence[int], size: int, at: int = 0) -> None:
        self._ids, self._size, self._at = tuple(ids), size, at

    def mask(self, left: int | None = None) -> NDArray[np.uint32]:
        words = np.zeros(-(-self._size // 32), dtype=np.uint32)
        token = self._ids[min(self._at, len(self._ids) - 1)]
        words[token // 32] = np.uint32(1 << token % 32)
        return words

    def forced(self) -> Sequence[int]:
        return self._ids[self._at :]

    def advance(self, token: int) -> bool:
        self._at += token == self._ids[self._at]
        return self._at >= len(self._ids)

    def fork(self) -> Forced:
        return Forced(self._ids, self._size, self._at)

    @property
    def accepting(self) -> bool:
        return self._at >= len(self._ids)

    @property
    def answering(self) -> bool:
        return True


@dataclass
class Turned:
    """A request of a conversation with tools or an answer, as the server read it. turn: the number of the script's."""

    turn: int
    tools: list[str]
    prompt: int
    results: list[str]


@dataclass
class Script:
    """What the model writes. log: what it was asked, without conversations that got `ASIDE`."""

    turns: Sequence[Turn]
    answers: Mapping[str, str] = field(default_factory=dict)
    log: list[Turned] = field(default_factory=list)

    def of(self, wanted: GenerationRequest, prompt: int) -> Turn:
        messages, called = wanted.messages or (), wanted.tools and wanted.tool_choice != "none"
        answer = next((text for key, text in self.answers.items() if key in str(messages[-1]["content"])), None)
        if answer is None and not called:
            return ASIDE
        turn = sum(message["role"] == "assistant" for message in messages)
        results = [str(message["content"]) for message in messages if message["role"] == "tool"]
        self.log.append(Turned(turn, [tool.name for tool in wanted.tools], prompt, results))
        return self.turns[min(turn, len(self.turns) - 1)] if called else answer or ASIDE

    def preprocessor(self) -> type[Preprocessor]:
        """The server's own, whose requests write what the script says."""
        script = self

        class Scripted(Preprocessor):
            def prepare(self, wanted: GenerationRequest, budget: Budget | None = None) -> Prepared:
                prepared = super().prepare(wanted, budget)
                checker = prepared.request.stop_checker
                if wanted.messages is not None and isinstance(checker, TextStopChecker):
                    tags = self.chat.think_tags
                    opened = tags is not None and prepared.text.rstrip().endswith(tags.start)
                    text = THOUGHT if opened else ""
                    text += self._text(script.of(wanted, len(prepared.request.prompt)), wanted)
                    ids = [*self._tokenizer.encode(text, add_special=False), min(self._inputs.eos_ids)]
                    checker.constraint = Forced(ids, self._engine.facts.config.vocab_size)
                return prepared

            def _text(self, turn: Turn, wanted: GenerationRequest) -> str:
                if isinstance(turn, str):
                    return turn
                name = next(tool.name for tool in wanted.tools if tool.name in turn)
                assert self.chat.tools is not None, "the template has tools"
                return self.chat.tools.form.written([(name, turn[name])])

        return Scripted


def make_model(folder: Path) -> Path:
    """A small random model with a long context, and a vocabulary made of the project's own texts."""
    changes = {"num_hidden_layers": 1, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    made = make_talker(folder, changes | {"use_sliding_window": False, "sliding_window": None}, TEMPLATE)
    library = Tokenizer(models.BPE(byte_fallback=False))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [*(ROOT / "docs").glob("*.md"), *(ROOT / "tests/serve").rglob("*.py")]
    library.train_from_iterator((path.read_text(encoding="utf-8") for path in sorted(texts)), trainer)
    library.save(str(made / "tokenizer.json"))
    return made


@contextmanager
def scripted(
    turns: Sequence[Turn], folder: Path, port: int = 0, answers: Mapping[str, str] | None = None
) -> Iterator[tuple[Talker, Script]]:
    """A running server with this script; its model is named "tiny"."""
    script, made = Script(turns, answers or {}), make_model(folder)
    host = ModelHost("tiny", lambda report: LLM(made, pages=PAGES, page_size=64, report=report))
    app = make_app(host, Policy.of(None), None)
    with (
        mock.patch.object(service, "Preprocessor", script.preprocessor()),
        running(app, app.state.service, port) as talker,
    ):
        yield talker, script


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model that writes what a script says.")
    parser.add_argument("script", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    turns = json.loads(given.script.read_text(encoding="utf-8"))
    with TemporaryDirectory() as folder, scripted(turns, Path(folder), given.port) as (talker, script):
        print(f"serving at {talker.url}; Enter ends it", flush=True)
        input()
        for one in script.log:
            print(one)


if __name__ == "__main__":
    main()
