"""A request's texts, each an order with which any replica can begin it or go on with it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tokenwright.cluster.replica_messages import CARRIED, TextOrder
from tokenwright.engine import Request
from tokenwright.errors import RequestError
from tokenwright.llm.input_processor import InputProcessor, RequestOptions


def orders_of(request: Request, adapters: Sequence[str]) -> Iterator[TextOrder]:
    """An order for each text; the first has the prompt's log-probabilities. Raises RequestError for a beam search."""
    if request.search is not None:
        raise RequestError("beams: a server of replicas has no beam search; leave beams out, or serve one replica")
    whole = TextOrder(
        prompt=request.prompt[: request.prompt_length],
        written=request.prompt[request.prompt_length :],
        adapter=adapters[request.adapter - 1] if request.adapter else None,
        **{name: getattr(request, name) for name in CARRIED},
    )
    one = replace(request.params, n=1, best_of=None)
    yield replace(whole, params=one)
    other = replace(whole, params=replace(one, prompt_logprobs=None), prompt_logprobs_from=None)
    for at in range(1, request.params.choices):
        yield replace(other, choice=request.choice + at)


def requested(inputs: InputProcessor, order: TextOrder) -> Request:
    options = RequestOptions(adapter=order.adapter, thoughts=order.thoughts)
    request = inputs.build(order.prompt, order.params, options=options, written=order.written)
    return replace(request, **{name: getattr(order, name) for name in CARRIED if name != "params"})
