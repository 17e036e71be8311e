"""`tokenwright generate`: continue a prompt."""

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenwright.cli.options import shared as opt
from tokenwright.cli.options.sampling import SEVERAL, sampled
from tokenwright.cli.options.talking import CompactJson, Talking, ThinkingOption, ToolsFile, calls_of, seen_by
from tokenwright.cli.terminal.interrupt import INTERRUPTED, interruptible
from tokenwright.cli.terminal.output import console, remark, show_anything, write, write_json
from tokenwright.cli.terminal.statistics import facts, facts_line, memory_line, phases_line
from tokenwright.errors import RequestError

if TYPE_CHECKING:
    from tokenwright.engine.step import TopLogprob
    from tokenwright.llm.llm import LLM
    from tokenwright.llm.output_processor import Stream
    from tokenwright.llm.outputs import Completion, Piece, TreeToken
    from tokenwright.sampling_params import SamplingParams

Tree = Annotated[bool, typer.Option("--tree", help="Draw the search tree of the beams.", rich_help_panel=SEVERAL)]
CacheFile = Annotated[
    Path | None,
    typer.Option(
        help="Keep the KV cache in this file: a prompt that begins like the saved text starts after it.",
        rich_help_panel=opt.ENGINE,
    ),
]


Chat = Annotated[bool, typer.Option("--chat", help="Answer PROMPT as a chat message, through the chat template.")]
System = Annotated[
    str | None, typer.Option("--system", "-s", help="With --chat, the system message, which instructs the model.")
]
Images = Annotated[
    list[Path] | None,
    typer.Option("--image", help="With --chat, a picture before the message; may be given several times."),
]
Echo = Annotated[
    bool, typer.Option("--echo", help="Write the prompt before its continuation.", rich_help_panel=opt.OUTPUT)
]

CUT = 4  # exit code if a text is cut before its grammar ends


@sampled(several=True)
@opt.with_engine()
def generate(
    prompt: opt.Prompt = None,
    file: opt.PromptFile = None,
    chat: Chat = False,
    system: System = None,
    image: Images = None,
    thinking: ThinkingOption = None,
    tools: ToolsFile = None,
    chosen: dict[str, Any] = {"max_tokens": 128},  # noqa: B006  (the options of SamplingParams, see `sampled`)
    tree: Tree = False,
    model: opt.Model = None,
    engine: dict[str, Any] = {},  # noqa: B006  (the options that open the model, see `with_engine`)
    no_cache: opt.NoCache = False,
    cache_file: CacheFile = None,
    echo: Echo = False,
    json_: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Continue PROMPT: stream the text, then print one line with its cost.

    Without PROMPT and --file a piped text is the prompt. Sampling options that are not given come from the user's
    settings, else from the model's generation_config.json. Exit code 4: the text was cut before its grammar ended.
    """
    engine = opt.of_engine(engine)
    text = opt.read_prompt(prompt, file)
    show = Shown(echo=echo, json=json_, quiet=quiet, verbose=verbose, tree=tree)
    several = max(chosen.get(name) or 1 for name in ("n", "best_of", "beams"))
    _check(chosen, show, chat, system if thinking is None and tools is None and not image else "")
    talking = Talking.read(thinking, tools)
    if cache_file is not None:
        _check_cache_file(cache_file, several > 1, no_cache)
    phases: dict[str, float] = {}
    name = opt.the_model(None, model)
    with opt.opened(name, quiet=quiet or json_, phases=phases, max_sequences=several, **engine) as llm:
        there = llm.load_cache(cache_file) if cache_file is not None and os.path.lexists(cache_file) else 0
        run = PromptRun(
            *(llm, text, llm.sampling(**chosen), phases),
            cache=not no_cache,
            system=system,
            chat=talking if chat else None,
            pictures=image or (),
        )
        with interruptible():
            run.show(show, name)
            if cache_file is not None:
                run.save(cache_file, there, show)
    if code := INTERRUPTED if run.interrupted else CUT if run.cut and not run.unread else 0:
        raise typer.Exit(code)


def _check(chosen: dict[str, Any], show: "Shown", chat: bool, system: str | None) -> None:
    if show.tree and chosen.get("beams", 1) == 1:
        raise RequestError("--tree draws a beam search; give it --beams as well")
    if system is not None and not chat:
        raise RequestError("--system, --image, --thinking and --tools belong to a conversation; give --chat as well")
    if show.echo and (show.json or chat):
        raise RequestError(f"--echo writes the prompt as text; leave it or {'--json' if show.json else '--chat'} out")
    if show.quiet and show.verbose:
        raise RequestError("--quiet writes only the text and --verbose more; leave one of them out")


def _check_cache_file(path: Path, several: bool, no_cache: bool) -> None:
    if several:
        raise RequestError("--cache-file keeps the KV cache of one text; leave --texts, --best-of and --beams out")
    if no_cache:
        raise RequestError("--cache-file needs a KV cache and --no-cache has none; leave one of them out")
    from tokenwright.cache.snapshot import check_place

    check_place(path)


@dataclass(frozen=True, slots=True)
class Shown:
    echo: bool
    json: bool
    quiet: bool
    verbose: bool
    tree: bool


def _saved(tokens: int, path: Path) -> str:
    if not tokens:
        return f"nothing was saved to {path}: the text fills no page of the KV cache"
    return f"the K and V of {tokens:,} tokens are in {path}; a prompt that begins like this text starts after them"


class PromptRun:
    def __init__(
        self,
        llm: "LLM",
        prompt: str,
        params: "SamplingParams",
        phases: dict[str, float],  # seconds; the run adds its own
        *,
        cache: bool = True,
        system: str | None = None,
        chat: Talking | None = None,
        pictures: Sequence[Path] = (),
    ) -> None:
        self.llm = llm
        self.prompt = prompt
        self.params = params
        self.phases = phases
        self.interrupted = self.unread = False  # unread: stdout refused the text
        self._cache = cache
        self._chat = chat
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._messages.append({"role": "user", "content": seen_by(pictures, prompt)})
        start = time.perf_counter()
        alone = params.choices == params.beams == 1
        self._stream = self._streamed() if alone else None
        phases["request_s"] = time.perf_counter() - start
        self._done: Completion | None = None
        schema = params.grammar is not None and params.grammar.kind == "json_schema"
        self._compact = CompactJson() if schema else None

    def _streamed(self) -> "Stream":
        if self._chat is None:
            return self.llm.stream(self.prompt, self.params, cache=self._cache)
        return self.llm.chat_stream(self._messages, self.params, cache=self._cache, **self._chat.options)

    def show(self, show: Shown, model: str) -> None:
        if show.json:
            self.go(lambda _: True)
            write_json({"model": model, **self.as_json(verbose=show.verbose)})
        else:
            if not show.quiet:
                remark(memory_line(self.llm))
                if not self.prompt:
                    remark("the prompt is empty, so the model starts a new text")
            self.to_stdout(show)
            self.remarks(tree=show.tree)
            if not (show.quiet or self.unread):
                remark(facts_line(self.llm, self.completion))
            if show.verbose:
                remark(phases_line(self.completion, self.phases))
        if self.cut and not self.interrupted:
            reasons = sorted({str(one.finish_reason) for one in self.completion.choices if not one.complete})
            cut = f"the text was cut ({' and '.join(reasons)}) before its grammar ended"
            remark(f"tokenwright: {cut}; raise -n or bound its length")

    def save(self, path: Path, there: int, show: Shown) -> None:
        """Save the KV cache to `path`, which had `there` tokens, unless they were another text's."""
        other = there and not self.completion.usage.reused_tokens
        saved = 0 if other else self.llm.save_cache(path, self.tokens)
        if other:
            remark(f"{path} was not changed: it has {there:,} tokens of another text")
        elif not show.quiet and not show.json:
            remark(_saved(saved, path))

    @property
    def cut(self) -> bool:
        begun = self._stream is not None or self._done is not None
        return begun and not all(one.complete for one in self.completion.choices)

    @property
    def tokens(self) -> list[int]:
        if self._chat is None:
            prompt: Sequence[int] = self.llm.tokenizer.encode(self.prompt)
        else:
            prompt = self.llm.render(self._messages, **self._chat.options).ids
        return [*prompt, *self.completion.token_ids]

    @property
    def completion(self) -> "Completion":
        done = self._done if self._stream is None else self._stream.completion
        assert done is not None, "`go` has run"
        return done

    def go(self, write: Callable[[str], bool]) -> None:
        if self._stream is None:
            self._several(write)
            return
        with self._stream:
            try:
                self.unread = not all(write(self._shown(piece)) for piece in self._stream)
                if self._chat is not None and self._chat.tools and not self.unread:
                    write(calls_of(self._stream.completion))
            except KeyboardInterrupt:
                self.interrupted = True

    def _shown(self, piece: "Piece") -> str:
        text = piece.text if self._chat is None else self._chat.shown(piece)
        return text if self._compact is None else self._compact(text)

    def _several(self, write: Callable[[str], bool]) -> None:
        what = f"searching with {self.params.beams} beams" if self.params.beams > 1 else "writing"
        with console().status(f"[dim]{what}"):
            if self._chat is None:
                [self._done] = self.llm.generate([self.prompt], self.params, cache=self._cache)
            else:
                options = self._chat.options
                self._done = self.llm.chat(self._messages, self.params, cache=self._cache, **options)
        texts = [one.text if self._chat is None else self._chat.text(one) for one in self._done.choices]
        shown = [one if len(texts) == 1 else f"[{place}] {one}" for place, one in enumerate(texts, 1)]
        self.unread = not write("\n".join(shown))

    def remarks(self, *, tree: bool) -> None:
        done, tokens = self.completion, self.llm.tokenizer
        if tree:
            for line in picture(done.tree, lambda ids: tokens.decode(ids, skip_special=False), done.ends):
                remark(line)
        for place, one in enumerate(done.choices if self.params.logprobs is not None else (), 1):
            if len(done.choices) > 1:
                remark(f"[{place}]")
            for token, logprob, top in zip(one.token_ids, one.logprobs, one.top_logprobs, strict=True):
                others = "  ".join(f"{tokens.token_text(other.token)!r} {other.logprob:.2f}" for other in top)
                remark(f"{logprob:8.3f}  {tokens.token_text(token)!r:<16} {others}".rstrip())

    def to_stdout(self, show: Shown) -> None:
        show_anything()
        if show.echo:
            write(self.prompt)
        elif not show.quiet and sys.stdout.isatty():
            from rich.console import Console
            from rich.text import Text

            Console().print(Text(self.prompt, style="dim"), end="", soft_wrap=True)
        try:
            self.go(write)
        finally:
            write("\n")

    def as_json(self, *, verbose: bool = False) -> dict[str, Any]:
        done = self.completion
        texts = [self._one(one) for one in done.choices]
        more: dict[str, Any] = {"choices": texts} if len(texts) > 1 else {}
        if done.tree:
            more["tree"] = [asdict(token) for token in done.tree]
        if verbose:
            more["phases"] = self.phases
        return {"prompt": self.prompt, **texts[0], **more, "facts": facts(self.llm, done)}

    def _one(self, one: "Completion") -> dict[str, Any]:
        record: dict[str, Any] = {
            "text": one.text,
            "token_ids": list(one.token_ids),
            "finish_reason": str(one.finish_reason),
        }
        if self._chat is not None:
            record |= {"content": one.content, "reasoning": one.reasoning}
            record["tool_calls"] = [asdict(call) for call in one.tool_calls]
        if one.stopped is not None:
            record["stopped"] = one.stopped
        if self.params.grammar is not None:
            record["complete"] = one.complete
        if one.score is not None:
            record["score"] = one.score
        if self.params.logprobs is not None:
            text = self.llm.tokenizer.token_text
            record["tokens"] = [text(token) for token in one.token_ids]
            record["logprobs"] = list(one.logprobs)
            record["sampler_logprobs"] = [_finite(value) for value in one.sampler_logprobs]
            record["top_logprobs"] = [[_likely(other, text(other.token)) for other in top] for top in one.top_logprobs]
        return record


def _likely(one: "TopLogprob", token: str) -> dict[str, Any]:
    found = {"token": token, "token_id": one.token, "logprob": one.logprob}
    return found | {"sampler_logprob": _finite(one.sampler_logprob)}


def _finite(value: float) -> float | None:
    """A filtered token's log-probability is infinite, which JSON lacks."""
    return value if math.isfinite(value) else None


def picture(tree: Sequence["TreeToken"], text: Callable[[Sequence[int]], str], best: Sequence[int]) -> list[str]:
    """A beam search as lines of text, one for tokens without a fork; they show where beams fork, are dropped and end.

    best: the indices in `tree` of the returned texts' last tokens.
    """
    below: dict[int | None, list[int]] = {}
    for place, token in enumerate(tree):
        below.setdefault(token.parent, []).append(place)
    ranks = {place: rank for rank, place in enumerate(best, 1)}
    lines: list[str] = []
    stack = [(place, "", i == 0) for i, place in enumerate(reversed(below.get(None, [])))]
    while stack:
        place, indent, last = stack.pop()
        run = [place]
        while len(children := below.get(run[-1], [])) == 1:
            run += children
        end = tree[run[-1]]
        words = text([tree[one].token_id for one in run]).replace("\n", "⏎")
        note = f"{end.score:.2f}"
        if end.reason is not None:
            note += f"  {end.reason}"
        elif not children:
            note += "  left"
        if run[-1] in ranks:
            note += f"  #{ranks[run[-1]]}"
        lines.append(f"{indent}{'└─' if last else '├─'} {words!r} {note}")
        indent += "   " if last else "│  "
        stack += [(child, indent, i == 0) for i, child in enumerate(reversed(children))]
    return lines
