"""`tokenwright generate`: continue a prompt."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenwright.cli import options as opt
from tokenwright.cli.facts import facts, facts_line, memory_line
from tokenwright.cli.output import remark, show_anything, write, write_json
from tokenwright.errors import RequestError

if TYPE_CHECKING:
    from tokenwright.completion import Completion
    from tokenwright.engine.params import SamplingParams
    from tokenwright.llm import LLM

CacheFile = Annotated[
    Path | None,
    typer.Option(
        help="Keep the KV cache here: a prompt that begins like the saved text is not read again.",
        rich_help_panel=opt.ENGINE,
    ),
]


def generate(
    prompt: opt.Prompt = None,
    file: opt.PromptFile = None,
    new_tokens: opt.NewTokens = 128,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    ignore_eos: opt.IgnoreEos = False,
    model: opt.Model = "stories",
    revision: opt.Revision = None,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    no_cache: opt.NoCache = False,
    kv: opt.Kv = "native",
    window: opt.Window = None,
    sinks: opt.Sinks = 0,
    cache_file: CacheFile = None,
    page_size: opt.PageSize = 16,
    token_budget: opt.TokenBudget = 512,
    json_: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Continue PROMPT: the text as it comes, then one line of facts about it.

    Sampling options that are not given are the model's own (its generation_config.json).
    """
    from tokenwright.cache.snapshot import check_place
    from tokenwright.engine.params import SamplingParams

    text = opt.read_prompt(prompt, file)
    chosen = opt.given(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_tokens=new_tokens,
        stop=tuple(stop) if stop else None,
        ignore_eos=ignore_eos or None,
    )
    SamplingParams(**chosen)  # refuses what it must before a model is loaded
    if cache_file is not None and no_cache:
        raise RequestError("--cache-file keeps the KV cache and --no-cache has none; leave one of them out")
    if cache_file is not None:
        check_place(cache_file)
    with opt.opened(
        model,
        quiet=quiet or json_,
        revision=revision,
        device=device,
        dtype=dtype,
        kv=kv,
        window=window,
        sinks=sinks,
        page_size=page_size,
        token_budget=token_budget,
        max_sequences=1,
    ) as llm:
        there = llm.load_cache(cache_file) if cache_file is not None and os.path.lexists(cache_file) else 0
        run = Run(llm, text, llm.sampling(**chosen), cache=not no_cache)
        if json_:
            run.go(lambda _: True)
            write_json({"model": model, **run.as_json()})
        else:
            if not quiet:
                remark(memory_line(llm))
            run.to_stdout(echo=not quiet)
            if not (quiet or run.unread):
                remark(facts_line(llm, run.completion))
        if cache_file is not None:
            other = there and not run.completion.usage.reused_tokens
            saved = 0 if other else llm.save_cache(cache_file, run.tokens)
            if other:
                remark(f"{cache_file} is left as it was: it holds {there:,} tokens of another text")
            elif not quiet and not json_:
                remark(_saved(saved, cache_file))
    if run.interrupted:
        raise typer.Exit(130)


def _saved(tokens: int, path: Path) -> str:
    if not tokens:
        return f"nothing was saved to {path}: the text fills no page of the KV cache"
    return f"the K and V of {tokens:,} tokens are in {path}; a prompt that begins like this text starts behind them"


class Run:
    """One prompt being continued. `interrupted`: by Ctrl-C. `unread`: whoever read the text has gone."""

    def __init__(self, llm: LLM, prompt: str, params: SamplingParams, *, cache: bool) -> None:
        self.llm = llm
        self.prompt = prompt
        self.interrupted = self.unread = False
        self._stream = llm.stream(prompt, params, cache=cache)

    @property
    def tokens(self) -> list[int]:
        """The whole text so far, prompt included, as ids."""
        return [*self.llm.tokenizer.encode(self.prompt), *self.completion.token_ids]

    @property
    def completion(self) -> Completion:
        """What has been written so far."""
        return self._stream.completion

    def go(self, write: Callable[[str], bool]) -> None:
        """Hands the text to `write` as it comes, to the end or until one of the two ways to end it early."""
        with self._stream:
            try:
                self.unread = not all(write(piece.text) for piece in self._stream)
            except KeyboardInterrupt:
                self.interrupted = True

    def to_stdout(self, *, echo: bool) -> None:
        """The text as it comes, a final newline after it; a terminal sees the prompt first, dimly."""
        from rich.console import Console
        from rich.text import Text

        show_anything()
        if echo and sys.stdout.isatty():
            Console().print(Text(self.prompt, style="dim"), end="", soft_wrap=True)
        try:
            self.go(write)
        finally:
            write("\n")

    def as_json(self) -> dict[str, Any]:
        done = self.completion
        return {
            "prompt": self.prompt,
            "text": done.text,
            "token_ids": list(done.token_ids),
            "finish_reason": str(done.finish_reason),
            "facts": facts(self.llm, done),
        }
