"""Turns a run into the values of a trace file (cards of model and text, state, frames), and into a page."""

from base64 import b64encode
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenwright
from tokenwright.checks import check_whole
from tokenwright.engine.pictures import Pixels, Spans
from tokenwright.errors import RequestError
from tokenwright.llm.asking import ModelEngine
from tokenwright.llm.engine import LLMEngine
from tokenwright.llm.web_page import HEIGHT, alone, framed
from tokenwright.models.cost import CostModel
from tokenwright.sampling_params import SamplingParams
from tokenwright.text import TextStream, Tokenizer
from tokenwright.trace import schema
from tokenwright.trace.frame_codec import as_json, named_ids
from tokenwright.trace.schema import ModelCard, PictureCard, RunCard, RunState, StepFrame, TokenCard
from tokenwright.trace.summary import summarise

if TYPE_CHECKING:  # a run makes its trace by this module
    from tokenwright.llm.run import Run
    from tokenwright.trace.summary import RunHalf


_SIZES = ("layers", "width", "heads", "kv_heads", "head_size", "vocab_size", "context")


def token_cards(tokenizer: Tokenizer, ids: Iterable[int]) -> tuple[TokenCard, ...]:
    return tuple(TokenCard(i, tokenizer.token_text(i), i in tokenizer.special_ids) for i in ids)


def model_card(engine: ModelEngine, name: str) -> ModelCard:
    facts, usual, pool = engine.facts, engine.inputs.sampling(), engine.pool
    costs = CostModel(facts.graph, engine.specs)
    config = facts.config
    return ModelCard(
        name=name,
        version=tokenwright.__version__,
        device=str(facts.device),
        dtype=facts.dtype,
        **{name: getattr(config, name) for name in _SIZES},
        latent=0 if config.latent is None else config.latent.rank + config.latent.rope,
        windows=tuple(0 if i in facts.graph.recurrent else window for i, window in enumerate(config.windows)),
        block_weights=costs.block_weights,
        head_weights=costs.head_weights,
        weight_bytes=engine.weight_bytes,
        kv_bytes_per_token=costs.bytes_per_token,
        state_bytes=costs.state_bytes,
        kv_format=engine.kv_format,
        page_size=pool.page_size,
        pages=pool.pages,
        eos_ids=tuple(sorted(engine.inputs.eos_ids)),
        **{name: getattr(usual, name) for name in ("temperature", "top_k", "top_p")},
    )


def run_card(engine: LLMEngine, run: "Run", name: str, prompt: str) -> RunCard:
    """The beginning of a run; `prompt`: its text, for display; `name`: of the model."""
    start = run.start
    ids = run.tokens[len(start.prompt) : len(run.tokens) - sum(frame.token is not None for frame in run.frames)]
    written = TextStream(engine.facts.tokenizer, start.params.stop, start.prompt)  # their text as a viewer has seen it
    for token in ids:
        written.push(token)
    return RunCard(
        run="run",
        model=name,
        prompt=prompt,
        tokens=token_cards(engine.facts.tokenizer, start.prompt),
        written=token_cards(engine.facts.tokenizer, ids),
        written_text=written.text,
        **_sampling(start.params),
        first_step=run.first_step,
        watched=run.watched,
        parent=None,
        pictures=picture_cards(engine, run.pictures),
    )


def picture_cards(engine: LLMEngine, spans: Spans) -> tuple[PictureCard, ...]:
    """The cards of a prompt's pictures; adjacent spans of one picture make one card."""
    found: list[PictureCard] = []
    for span in spans:
        if span.first and found:
            found[-1] = replace(found[-1], starts=(*found[-1].starts, span.start))
            continue
        pixels, cell = span.pixels, engine.loaded.vision.sight.tower.cell
        found.append(PictureCard(pixels.height // cell, pixels.width // cell, (span.start,), _url(pixels)))
    return tuple(found)


def _url(pixels: Pixels) -> str:
    from PIL import Image

    size, file = (pixels.width, pixels.height), BytesIO()
    Image.frombytes("RGB", size, pixels.data[: 3 * pixels.width * pixels.height]).save(file, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"


def _sampling(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens", "stop", "ignore_eos")
    return {name: getattr(params, name) for name in names}


def trace_values(
    engine: LLMEngine, card: RunCard, state: RunState, frames: Iterable[StepFrame], halves: "Iterable[RunHalf]" = ()
) -> dict[str, Any]:
    kept, halves = list(frames), list(halves)  # another thread may append
    every = [*kept, *(frame for half in halves for frame in half.frames)]
    named = {token for frame in every for token in (*named_ids(frame), frame.token) if token is not None}
    labels = token_cards(engine.facts.tokenizer, sorted(named))
    whole = asdict(
        schema.Trace("tokenwright-trace", schema.VERSION, model_card(engine, card.model), card, state, labels, (), ())
    )
    both = [_half_values(engine, half, state.summary) for half in halves]
    return whole | {"steps": [as_json(frame) for frame in kept], "halves": both}


def _half_values(engine: LLMEngine, half: "RunHalf", whole: schema.Summary | None) -> dict[str, Any]:
    own = summarise(half.frames, engine.facts.config.layers)
    done = own is not None and whole is not None and own.written == whole.written
    values = asdict(schema.Half(half.cache, own if done else None, ()))
    return values | {"steps": [as_json(frame) for frame in half.frames]}


def trace_of(engine: LLMEngine, run: "Run", halves: "Iterable[RunHalf]" = ()) -> dict[str, Any]:
    """The trace of a run outside a server, with the prompt's text decoded from its ids."""
    card = run_card(engine, run, engine.facts.name, engine.facts.tokenizer.decode(run.start.prompt))
    return trace_of_card(engine, run, card, halves)


def trace_of_card(engine: LLMEngine, run: "Run", card: RunCard, halves: "Iterable[RunHalf]") -> dict[str, Any]:
    state = RunState(
        state="done" if run.ended else "paused",
        steps=run.first_step + len(run.frames),
        cache=run.cache,
        pace=None,
        lease_s=None,
        throttled=False,
        reason=run.reason and run.reason.value,
        message="",
        watched=run.watched,
        summary=run.summary if run.ended else None,
    )
    return trace_values(engine, card, state, run.frames, halves)


@dataclass(frozen=True, repr=False)
class RunPage:
    """A run in the explorer's page, which plays it without a server: 0.8 MB of HTML, in a frame of `height`."""

    html: str
    height: int

    def __repr__(self) -> str:
        return f"<RunPage of {len(self.html):,} characters; a notebook displays it, save(path) writes it>"

    def _repr_html_(self) -> str:
        return framed(self.html, self.height)

    def save(self, path: str | Path) -> Path:
        """Write the page to a file that any browser opens. Raises RequestError where that fails."""
        target = Path(path).expanduser()
        try:
            target.write_text(self.html, encoding="utf-8")
        except OSError as error:
            raise RequestError(f"the page cannot be written to {target}: {error.strerror}") from error
        return target


def show(run: "Run", *, height: int = HEIGHT) -> RunPage:
    """The steps of a run so far, in the explorer's page; a notebook displays the result.

    height: CSS pixels of its frame, at least 200. Raises RequestError without a built page or a run of `LLM.run`.
    """
    from tokenwright.llm.run import Run  # it makes its trace by this module

    if not isinstance(run, Run):
        raise RequestError(f"show takes a run of LLM.run, not {type(run).__name__}")
    check_whole("height", height, 200)
    return RunPage(alone(run.trace()), height)
