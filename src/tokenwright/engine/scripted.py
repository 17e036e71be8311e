"""A model that follows a script, so that the engine can be run and tested by hand, without a tensor.

    python -m tokenwright.engine.scripted

Its "KV cache" stores, in each slot, the very token whose K and V would stand there. Before it answers it reads
the whole text back through the page table: a page that is wrong, stale or shared by mistake is caught at once.
"""

from collections.abc import Callable
from collections.abc import Sequence as ListLike

from tokenwright.engine.engine import Engine
from tokenwright.engine.pages import PagePool
from tokenwright.engine.scheduler import Scheduler
from tokenwright.engine.sequence import Request, SamplingParams
from tokenwright.engine.step import Output, Pick, Result, Score, Step, Wants

Script = Callable[[ListLike[int]], int]  # the text so far -> the next token


class ScriptedModel:
    """Runner and sampler in one. `logits` are the texts that were read back from the cache, one for each row."""

    def __init__(self, script: Script, pages: int, page_size: int) -> None:
        self.script = script
        self.page_size = page_size
        self.slots: list[int | None] = [None] * (pages * page_size)
        self.forwarded = 0

    def forward(self, step: Step) -> Output[list[list[int]]]:
        rows: list[range] = []
        texts: list[list[int]] = []
        for chunk in step.chunks:
            for position, token in enumerate(chunk.tokens, chunk.start):
                self.slots[self._slot(chunk.pages, position)] = token
            self.forwarded += len(chunk.tokens)
            first = {Wants.NONE: chunk.stop, Wants.LAST: chunk.stop - 1, Wants.ALL: chunk.start}[chunk.wants]
            rows.append(range(len(texts), len(texts) + chunk.stop - first))
            texts += [self._read(chunk.pages, position + 1) for position in range(first, chunk.stop)]
        return Output(tuple(rows), texts)

    def pick(self, output: Output[list[list[int]]], step: Step) -> list[Result]:
        results: list[Result] = []
        for chunk, rows in zip(step.chunks, output.rows, strict=True):
            if chunk.wants is Wants.ALL:
                agree = tuple(
                    0.0 if self.script(output.logits[row]) == token else -1.0
                    for row, token in zip(rows, chunk.following, strict=False)
                )
                results.append(Score(chunk.sequence, chunk.start + 1, agree))
            if chunk.picks:
                results.append(Pick(chunk.sequence, self.script(output.logits[rows[-1]]), 0.0))
        return results

    def _slot(self, pages: ListLike[int], position: int) -> int:
        return pages[position // self.page_size] * self.page_size + position % self.page_size

    def _read(self, pages: ListLike[int], length: int) -> list[int]:
        text = [self.slots[self._slot(pages, position)] for position in range(length)]
        assert None not in text, "a slot was read that nobody wrote"
        return [token for token in text if token is not None]


def scripted_engine(
    script: Script,
    *,
    pages: int = 8,
    page_size: int = 4,
    token_budget: int = 16,
    max_sequences: int = 4,
    context: int = 32,
) -> tuple[Engine[list[list[int]]], ScriptedModel]:
    """An engine over a scripted model."""
    model = ScriptedModel(script, pages, page_size)
    scheduler = Scheduler(PagePool(pages, page_size), token_budget, max_sequences)
    return Engine(model, model, scheduler, context), model


def main() -> None:
    """Count upwards from three prompts at once and print every event."""
    engine, _ = scripted_engine(lambda text: text[-1] + 1, pages=6)
    for first in (10, 20, 30):
        engine.submit(Request((first, first + 1, first + 2), SamplingParams(max_tokens=6)))
    number = 0
    while engine.busy:
        number += 1
        for event in engine.step():
            print(f"step {number:2}  free pages {engine.pool.free}  {event}")


if __name__ == "__main__":
    main()
