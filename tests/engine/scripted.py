"""A model that follows a script, so that the engine can be run and tested by hand, without a tensor.

    python -m tests.engine.scripted

Its "KV cache" stores, in each slot, the very token whose K and V would stand there. Before it answers it reads the text
back through the page tables, as far as a row reads in each group. So it notices at once a page that is wrong, stale,
released too early or shared by mistake. A state is the whole text so far, in the first slot of its page.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListLike
from typing import Any

from tokenwright.engine.core import Engine
from tokenwright.engine.layer_group import Group, StateWindow
from tokenwright.engine.page_pool import PagePool
from tokenwright.engine.request import Request
from tokenwright.engine.scheduler import Scheduler
from tokenwright.engine.step import Chunk, HiddenStates, LogitsNeeded, Output, Pick, PromptLogprobs, Result, Step
from tokenwright.sampling_params import SamplingParams

Script = Callable[[ListLike[int]], int]  # the text so far -> the next token


class ScriptedModel:
    """Runner, sampler and memory in one.

    `logits` are the texts that were read back from the first group, one for each row; so are the hidden states, for
    chunks that need them. Other groups must hold the same tokens wherever they are read. The first has no states.
    """

    def __init__(self, script: Script, groups: ListLike[Group], page_size: int) -> None:
        self.script = script
        self.groups = tuple(groups)
        self.page_size = page_size
        self.slots: list[list[Any]] = [[None] * (group.pages * page_size) for group in groups]
        self.forwarded = 0

    def forward(self, step: Step) -> Output[list[list[int]]]:
        rows: list[range] = []
        texts: list[list[int]] = []
        hidden: list[list[int]] = []
        for chunk in step.chunks:
            for position, token in enumerate(chunk.tokens, chunk.start):
                for group, slots, table in zip(self.groups, self.slots, chunk.sequence.tables, strict=True):
                    if position // self.page_size in table and not isinstance(group.window, StateWindow):
                        slots[self._slot(table, position)] = token
            for group, slots, table in zip(self.groups, self.slots, chunk.sequence.tables, strict=True):
                if isinstance(group.window, StateWindow):
                    self._rewrite(chunk, slots, table)
            self.forwarded += chunk.stop - chunk.start
            needed = chunk.logits_needed
            first = {LogitsNeeded.NONE: chunk.stop, LogitsNeeded.LAST: chunk.stop - 1}.get(needed, chunk.start)
            answers = hidden if needed is LogitsNeeded.HIDDEN else texts
            rows.append(range(len(answers), len(answers) + chunk.stop - first))
            answers += [self._read(chunk.sequence.tables, position) for position in range(first, chunk.stop)]
        return Output(tuple(rows), texts, hidden=hidden)

    def _rewrite(self, chunk: Chunk, slots: list[Any], table: Mapping[int, int]) -> None:
        """Go on from the state that a chunk begins with, and write it where the table has a page for it."""
        size = self.page_size
        state = slots[table[(chunk.start - 1) // size] * size] if chunk.start else ()
        assert isinstance(state, tuple) and len(state) == chunk.start, "a state was read that belongs elsewhere"
        for stop, token in enumerate(chunk.tokens, chunk.start + 1):
            state = (*state, token)
            page = (stop - 1) // size
            if page in table and (stop % size == 0 or stop == chunk.stop):
                slots[table[page] * size] = state

    def copy(self, group: int, source: int, target: int) -> None:
        self.write(group, [target], self.read(group, [source]))

    def read(self, group: int, pages: ListLike[int]) -> list[list[Any]]:
        return [self.slots[group][page * self.page_size : (page + 1) * self.page_size] for page in pages]

    def write(self, group: int, pages: ListLike[int], contents: list[list[Any]]) -> None:
        for page, content in zip(pages, contents, strict=True):
            self.slots[group][page * self.page_size : (page + 1) * self.page_size] = content

    def pick(self, output: Output[list[list[int]]], step: Step) -> list[Result]:
        results: list[Result] = []
        for chunk, rows in zip(step.chunks, output.rows, strict=True):
            if chunk.logits_needed is LogitsNeeded.ALL and not chunk.drafts:
                agree = tuple(
                    0.0 if self.script(output.logits[row]) == token else -1.0
                    for row, token in zip(rows, chunk.following, strict=False)
                )
                results.append(PromptLogprobs(chunk.sequence.id, chunk.start + 1, agree))
            if chunk.logits_needed is LogitsNeeded.HIDDEN:
                assert output.hidden is not None, "forward answers every chunk"
                results.append(HiddenStates(chunk.sequence.id, chunk.start, output.hidden[rows.start : rows.stop]))
            if chunk.picks:
                results.append(self._picked(chunk, output.logits[rows.stop - 1 - len(chunk.drafts) : rows.stop]))
        return results

    def _picked(self, chunk: Chunk, texts: ListLike[list[int]]) -> Pick:
        """The next tokens after the texts that rows of drafts have read: up to the first that is not the draft."""
        tokens: list[int] = []
        for text, draft in zip(texts, (*chunk.drafts, None), strict=True):
            tokens.append(self.script(text))
            if tokens[-1] != draft:
                break
        zeros = (0.0,) * len(tokens)
        return Pick(chunk.sequence.id, tuple(tokens), zeros, zeros, ((),) * len(tokens))

    def _slot(self, table: Mapping[int, int], position: int) -> int:
        return table[position // self.page_size] * self.page_size + position % self.page_size

    def _read(self, tables: ListLike[Mapping[int, int]], row: int) -> list[int]:
        """What the row at a position reads in the first group; the others must hold the same."""
        texts = []
        for group, slots, table in zip(self.groups, self.slots, tables, strict=True):
            if isinstance(group.window, StateWindow):
                continue
            positions = [position for span in group.window.spans(row, row + 1) for position in span]
            texts.append({position: slots[self._slot(table, position)] for position in positions})
        for text in texts:
            assert None not in text.values(), "a slot was read that was never written"
            shared = texts[0].keys() & text.keys()
            assert all(text[position] == texts[0][position] for position in shared), "two groups hold different texts"
        return [token for token in texts[0].values() if token is not None]


def scripted_engine(
    script: Script,
    *,
    pages: int = 8,
    page_size: int = 4,
    token_budget: int = 16,
    max_sequences: int = 4,
    context: int = 32,
) -> tuple[Engine, ScriptedModel]:
    """An engine over a scripted model."""
    groups = [Group(pages)]
    model = ScriptedModel(script, groups, page_size)
    scheduler = Scheduler(PagePool(groups, page_size, model), token_budget, max_sequences)
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
            print(f"step {number:2}  free pages {engine.pool.available}  {event}")


if __name__ == "__main__":
    main()
