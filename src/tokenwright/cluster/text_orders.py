"""The texts of a request, each an order of its own: so each of them can go on at another replica."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tokenwright.cluster.replica_messages import TextOrder
from tokenwright.engine import Request
from tokenwright.errors import RequestError


def orders_of(request: Request, adapters: Sequence[str]) -> Iterator[TextOrder]:
    """An order for each text; the first one has the prompt's log-probabilities. adapters: their names, by number.

    Raises RequestError for a beam search, whose texts are one.
    """
    if request.search is not None:
        raise RequestError("beams: a server of replicas has no beam search; leave beams out, or serve one replica")
    for at in range(request.params.choices):
        first = at == 0
        prompt_logprobs = request.params.prompt_logprobs if first else None
        yield TextOrder(
            prompt=request.prompt,
            written=(),
            params=replace(request.params, n=1, best_of=None, prompt_logprobs=prompt_logprobs),
            salt=request.salt,
            adapter=adapters[request.adapter - 1] if request.adapter else None,
            cache=request.cache,
            share=request.share,
            hidden=request.hidden,
            prompt_logprobs_from=request.prompt_logprobs_from if first else None,
            choice=request.choice + at,
            speculate=request.speculate,
            prediction=request.prediction,
        )
