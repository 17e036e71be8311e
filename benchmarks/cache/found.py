"""The time that a prompt's provenance adds to the first token of a prompt that the cache holds whole.

    python -m benchmarks.cache.found [--tokens 100000] [--pairs 30] [--layers 6] [--folder build/found]

A conversation of 200 messages is asked again and again, in pairs: with provenance, and with a template that marks no
part of its text. The template runs in this process for both. The model is the smallest shape, `tiny`; a larger one
makes the share smaller, and --layers 2 shows what remains where nearly nothing of the first token is the model's step.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from jinja2.exceptions import TemplateError

from benchmarks.kernels.pairs import interval
from benchmarks.serving.reliability_parts import about
from benchmarks.serving.serving import prompt_of
from benchmarks.serving.turns import TEMPLATE
from tokenwright import LLM
from tokenwright.bench import shapes
from tokenwright.errors import RequestError
from tokenwright.text import renderer, template_process

MESSAGES, WORD_TOKENS = 200, 1.2  # the built-in tokenizer's tokens a word, about


def model(folder: Path, tokens: int, layers: int) -> Path:
    """The shape `tiny` with a context of twice the tokens."""
    long = {**shapes.SHAPES["tiny"], "num_hidden_layers": layers, "max_position_embeddings": 2 * tokens}
    if not folder.exists():
        with patch.object(shapes, "SHAPES", {"long": long}):
            shapes.make("long", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@contextmanager
def template_here() -> Iterator[None]:
    """Render in this process what the template's process would render."""
    template = template_process.compiled(TEMPLATE)

    def render(_: object, messages: Any, add_generation_prompt: bool, more: Any = None) -> Any:
        ask = json.loads(json.dumps(renderer.question(messages, add_generation_prompt, more or {})))
        try:
            return renderer.read(json.loads(json.dumps(template_process.answered(template, {}, ask))))
        except TemplateError as error:
            raise RequestError(f"the template refuses this: {error}") from error

    with patch.object(renderer.Renderer, "render", render):
        yield


@contextmanager
def without_marks() -> Iterator[None]:
    with (
        patch.object(template_process, "marked", lambda value, _: value),
        patch.object(template_process, "marked_messages", lambda messages: messages),
        patch.object(template_process, "spans_of", lambda *_: []),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="keeps the model and its pages; a further run computes nothing")
    arguments = parser.parse_args()
    draws, words = random.Random(1), round(arguments.tokens / WORD_TOKENS / MESSAGES)
    lengths = [draws.randrange(words // 2, 3 * words // 2) for _ in range(MESSAGES - 1)]
    roles = ("user", "assistant")
    talk = [{"role": roles[at % 2], "content": prompt_of(draws, length)} for at, length in enumerate(lengths)]
    with (
        TemporaryDirectory() as made,
        template_here(),
        LLM(
            model((folder := arguments.folder or Path(made)) / "long", arguments.tokens, arguments.layers),
            kv_memory="2GB",
            kv_disk=folder / "pages",
        ) as llm,
    ):

        def first_token() -> tuple[float, Any]:
            began = time.perf_counter()
            stream = llm.chat_stream(talk, max_tokens=2, temperature=0.0, ignore_eos=True)
            next(stream)
            took = time.perf_counter() - began
            list(stream)
            return took, stream.completion.usage

        usage = first_token()[1]
        print(f"{usage.prompt_tokens:,} tokens, {arguments.pairs} pairs; {about()}", flush=True)
        times: tuple[list[float], list[float]] = ([], [])
        for pair in range(arguments.pairs):
            for off in (0, 1) if pair % 2 else (1, 0):
                if off:
                    with without_marks():
                        took, usage = first_token()
                else:
                    took, usage = first_token()
                assert usage.prompt_tokens - usage.reused_tokens <= 16, "all but a page is found"
                times[off].append(took)
    for name, one in zip(("with", "without"), times, strict=True):
        print(f"{name} provenance: {1000 * statistics.median(one):.1f} ms to the first token")
    ratios = [a / b for a, b in zip(*times, strict=True)]
    print("with / without: {:.4f} ({:.4f} to {:.4f})".format(*interval(ratios)))


if __name__ == "__main__":
    main()
