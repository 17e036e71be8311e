"""A run as the values of a trace file: the cards of its model and its text, its state, and all of its frames."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import tokenwright
from tokenwright.llm.engine import LLMEngine
from tokenwright.llm.run import Run
from tokenwright.sampling_params import SamplingParams
from tokenwright.text import TextStream
from tokenwright.trace.frame_codec import as_json, named_ids
from tokenwright.trace.messages.schema import VERSION, ModelCard, RunCard, RunState, StepFrame, TokenCard, Trace


def token_cards(model: LLMEngine, ids: Iterable[int]) -> tuple[TokenCard, ...]:
    """How the tokens of these ids look."""
    tokenizer = model.tokenizer
    return tuple(TokenCard(i, tokenizer.token_text(i), i in tokenizer.special_ids) for i in ids)


def model_card(model: LLMEngine, name: str) -> ModelCard:
    """What the formulas of the page need of a model."""
    config, costs, usual = model.config, model.costs, model.sampling()
    return ModelCard(
        name=name,
        version=tokenwright.__version__,
        device=model.device,
        dtype=model.dtype,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        latent=0 if config.latent is None else config.latent.rank + config.latent.rope,
        vocab_size=config.vocab_size,
        context=config.context,
        windows=config.windows,
        block_weights=costs.block_weights,
        head_weights=costs.head_weights,
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=costs.bytes_per_token,
        kv_format=model.kv_format,
        page_size=model.engine.pool.page_size,
        pages=model.engine.pool.pages,
        eos_ids=tuple(sorted(model.eos_ids)),
        temperature=usual.temperature,
        top_k=usual.top_k,
        top_p=usual.top_p,
    )


def run_card(model: LLMEngine, run: Run, name: str, prompt: str) -> RunCard:
    """What a run began with; `prompt` is its text, for display, and `name` the model's."""
    start = run.start
    ids = run.tokens[len(start.prompt) : len(run.tokens) - _written(run)]
    written = TextStream(model.tokenizer, start.params.stop, start.prompt)  # their text as a viewer has seen it
    for token in ids:
        written.push(token)
    return RunCard(
        run="run",
        model=name,
        prompt=prompt,
        tokens=token_cards(model, start.prompt),
        written=token_cards(model, ids),
        written_text=written.text,
        **_sampling(start.params),
        first_step=run.first_step,
        watched=run.watched,
        parent=None,
    )


def _written(run: Run) -> int:
    """How many tokens its frames have written."""
    return sum(frame.token is not None for frame in run.frames)


def _sampling(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens", "stop", "ignore_eos")
    return {name: getattr(params, name) for name in names}


def trace_values(model: LLMEngine, card: RunCard, state: RunState, frames: Iterable[StepFrame]) -> dict[str, Any]:
    """The content of trace.json, as JSON values."""
    kept = list(frames)  # another thread may append
    named = {token for frame in kept for token in (*named_ids(frame), frame.token) if token is not None}
    labels = token_cards(model, sorted(named))
    whole = asdict(Trace("tokenwright-trace", VERSION, model_card(model, card.model), card, state, labels, ()))
    return whole | {"steps": [as_json(frame) for frame in kept]}


def trace_of(model: LLMEngine, run: Run) -> dict[str, Any]:
    """The trace of a run that no server has: its prompt's text is that of its ids."""
    card = run_card(model, run, model.loaded.name, model.tokenizer.decode(run.start.prompt))
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
    return trace_values(model, card, state, run.frames)
