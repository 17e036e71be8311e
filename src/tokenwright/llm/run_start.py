"""Starts runs: from a prompt, or from a step of another run."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenwright.checks import check_whole
from tokenwright.engine import SamplingParams
from tokenwright.engine.pictures import Spans
from tokenwright.errors import RequestError
from tokenwright.llm.engine import LLMEngine, Recording
from tokenwright.llm.input_processor import Prompt, RequestOptions
from tokenwright.llm.run import Run, Start
from tokenwright.trace.summary import StepSums


def start_run(
    engine: LLMEngine,
    prompt: Prompt,
    params: SamplingParams,
    *,
    cache: bool = True,
    written: Sequence[int] = (),
    watched: tuple[int, int] = (0, 0),
    first_step: int = 0,
    earlier: Sequence[StepSums] = (),
    pictures: Spans = (),
) -> Run:
    """A run of a prompt, as `LLM.run` says. watched: the layer and head of the attention row in each frame."""
    check_whole("first_step", first_step)
    recording = _recording(engine, params)
    ids, salt = engine.inputs.ids(prompt), secrets.token_hex(8)  # so it finds no pages of another text
    options = RequestOptions(cache, salt, pictures=pictures)
    request = engine.inputs.build(ids, params, options, written=written)
    params = replace(params, seed=request.params.seed)
    return Run(engine, recording, request, Start(tuple(ids), params, salt, watched, first_step, tuple(earlier)))


def fork_run(engine: LLMEngine, run: Run, step: int, token: int | None, sampling: Mapping[str, Any]) -> Run:
    params = engine.inputs.params(run.start.params, sampling)
    recording = _recording(engine, params)
    if run.engine is not engine:
        raise RequestError("this run is another LLM's; fork it with the LLM that made it")
    start, context = run.start, run.context(step)
    last = run.tokens[context] if token is None else token
    written = engine.inputs.ids([*run.tokens[len(start.prompt) : context], last])
    if len(written) >= params.max_tokens:
        raise RequestError(f"max_tokens is {params.max_tokens}, which step {step + 1} reaches; raise it")
    options = RequestOptions(run.cache, start.salt, pictures=run.pictures)
    request = engine.inputs.build(start.prompt, params, options, written=written)
    if request.stop_checker.stopped is not None or (last in engine.inputs.eos_ids and not params.ignore_eos):
        raise RequestError(f"the text ends with the token {last} at step {step + 1}; take another token or step")
    request = replace(request, parent=run.sequence, shared=context)
    params = replace(params, seed=request.params.seed)
    return Run(engine, recording, request, Start(start.prompt, params, start.salt, run.watched, step + 1))


def _recording(engine: LLMEngine, params: SamplingParams) -> Recording:
    if max(params.choices, params.beams) > 1 or params.mirostat:  # a fork of a run does not know Mirostat's state
        raise RequestError("a run follows one text from any step; leave n, best_of, beams and mirostat out")
    if engine.recording is None:
        raise RequestError('this LLM records nothing; open it with LLM(..., trace=True), or use "stream"')
    return engine.recording
