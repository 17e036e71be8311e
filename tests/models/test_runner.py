"""The decoder as a function over a growing cache, and as the engine's runner over pages."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.fixtures import KINDS, VOCAB
from tests.oracle.harness import CPU, TOLERANCE, Subject, greedy, make_subject, prompt_of
from tokenwright.cache import KVStore, layer_specs
from tokenwright.engine import Chunk, Step, Wants
from tokenwright.errors import ContextError, RequestError
from tokenwright.models.decoder import Decoder
from tokenwright.models.runner import Cache, Model, TorchRunner


def in_pieces(model: Model, tokens: Sequence[int], cuts: Sequence[int]) -> tuple[torch.Tensor, Cache]:
    """Logits [t, V] of all tokens, computed piece by piece between the cuts."""
    cache: Cache | None = None
    parts: list[torch.Tensor] = []
    edges = sorted({0, len(tokens), *cuts})
    for start, stop in pairwise(edges):
        logits, cache = model(tokens[start:stop], cache)
        assert logits.shape == (stop - start, VOCAB)
        assert cache.length == stop
        parts.append(logits)
    assert cache is not None
    return torch.cat(parts), cache


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    length=st.integers(1, 128),
    cuts=st.lists(st.integers(1, 127), max_size=6),
    seed=st.integers(0, 100),
)
def test_the_function_is_the_oracle_wherever_it_is_cut(kind: str, length: int, cuts: list[int], seed: int) -> None:
    subject = make_subject(kind)
    tokens = prompt_of(length, seed)
    logits, cache = in_pieces(subject.model(), tokens, [cut for cut in cuts if cut < length])
    assert logits.dtype == torch.float32
    assert cache.nbytes == length * cache.store.bytes_per_token
    assert (logits - subject.logits(tokens, length)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_at_a_time_to_the_end_of_the_context(kind: str) -> None:
    subject = make_subject(kind)
    model = subject.model()
    tokens = prompt_of(min(model.context, 300))
    logits, cache = in_pieces(model, tokens, range(len(tokens)))
    assert cache.store.pages * model.PAGE_SIZE >= len(tokens)
    assert (logits - subject.logits(tokens, len(tokens))).abs().max() <= TOLERANCE


def test_the_cache_grows_and_keeps_what_it_holds() -> None:
    model = make_subject("llama2").model()
    tokens = prompt_of(300)
    first, cache = model(tokens[:10])
    small = cache.store
    assert small.pages == 1
    model(tokens[10:64], cache)
    assert cache.store is small, "64 tokens fit a page"
    last, same = model(tokens[64:], cache)
    assert same is cache
    assert 5 <= cache.store.pages <= 8, "it doubles, but never beyond the context"
    whole, _ = model(tokens)
    assert (torch.cat((first, last)) - torch.cat((whole[:10], whole[64:]))).abs().max() <= 1e-5


def test_what_cannot_be_computed_is_refused_and_leaves_the_cache_as_it_was() -> None:
    model = make_subject("qwen2").model()
    _, cache = model([7, 8, 9])
    for tokens in ([], [VOCAB], [-1], [5, 400], [True], [1.5], torch.tensor([1, 2])):
        with pytest.raises(RequestError, match=f"ids from 0 to {VOCAB - 1}, at least one"):
            model(tokens, cache)
    with pytest.raises(ContextError, match="513 tokens, 1 more than"):
        model([5] * 510, cache)
    assert cache.length == 3
    after, _ = model([10], cache)
    fresh, _ = model([7, 8, 9, 10])
    assert (after[0] - fresh[3]).abs().max() <= 1e-5


def test_dynamic_scaling_ends_at_the_original_context() -> None:
    """Beyond it the angles would depend on a length that a function is not told; the engine is told."""
    model = make_subject("dynamic").model()
    assert model.context == 128
    with pytest.raises(ContextError):
        model([5] * 129)


def test_gpt2_reads_its_positions_from_the_table() -> None:
    """Another row 5 in the table changes the logits from position 5 on, in whatever pieces they are computed."""
    subject = make_subject("gpt2")
    tokens = prompt_of(12)
    changed = dict(subject.weights)
    changed["positions.weight"] = changed["positions.weight"].clone()
    changed["positions.weight"][5].neg_()
    other = Subject(subject.kind, subject.config, changed, subject.dtype, subject.oracle)
    for cuts in ([], [5], [3, 6], range(12)):
        ours, _ = in_pieces(subject.model(), tokens, cuts)
        theirs, _ = in_pieces(other.model(), tokens, cuts)
        moved = (ours - theirs).abs().amax(-1) > 1e-5
        assert moved.tolist() == [False] * 5 + [True] * 7


@pytest.mark.parametrize("pieces", [[], range(0, 200, 7)])
def test_a_windowed_model_forgets_what_lies_behind_all_its_windows(pieces: Sequence[int]) -> None:
    """Three layers that each look back 47 tokens: the first token reaches position 141, and no further."""
    subject = make_subject("mistral")
    assert subject.config.windows == (48, 48, 48)
    tokens = list(prompt_of(200))
    ours, _ = in_pieces(subject.model(), tokens, pieces)
    theirs, _ = in_pieces(subject.model(), [tokens[0] + 1, *tokens[1:]], pieces)
    moved = (ours != theirs).any(-1)
    assert moved[0]
    assert 2 * 47 < int(moved.nonzero().max()) <= 3 * 47


def runner_of(subject: Subject, pages: int, page_size: int) -> TorchRunner:
    store = KVStore(layer_specs(subject.config, subject.dtype), pages, page_size, CPU)
    store.memory.fill_(torch.nan)
    return TorchRunner(subject.config, subject.decoder(), store, CPU)


def chunk_of(
    sequence: int, tokens: Sequence[int], start: int, stop: int, pages: tuple[int, ...], wants: Wants
) -> Chunk:
    part = tuple(tokens[start:stop])
    return Chunk(sequence, greedy(tokens, 9), start, part, pages, len(tokens) + 9, wants, tuple(tokens[start + 1 :]))


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "dynamic", "qwen2-window", "smollm3"])
def test_a_step_of_many_chunks_returns_the_rows_that_are_wanted(kind: str) -> None:
    """Three texts in one step, on pages that are scattered: all rows of one, none of another, the last of a third."""
    subject = make_subject(kind)
    runner = runner_of(subject, 16, 4)
    texts = [prompt_of(9, 1), prompt_of(6, 2), prompt_of(11, 3)]
    pages = [(3, 9, 0), (7, 1), (15, 4, 2)]
    wants = [Wants.ALL, Wants.NONE, Wants.LAST]
    first = runner.forward(Step(tuple(chunk_of(i, texts[i], 0, 5, pages[i][:2], wants[i]) for i in range(3))))
    assert first.rows == (range(5), range(5, 5), range(5, 6))
    second = runner.forward(
        Step(tuple(chunk_of(i, texts[i], 5, len(texts[i]), pages[i], Wants.ALL) for i in (2, 0, 1)))
    )
    assert second.rows == (range(6), range(6, 10), range(10, 11))
    limits = [len(text) + 9 for text in texts]
    right = [subject.logits(text, limit) for text, limit in zip(texts, limits, strict=True)]
    expected = torch.cat((right[0][:5], right[2][4:5]))
    assert (first.logits - expected).abs().max() <= TOLERANCE
    expected = torch.cat((right[2][5:], right[0][5:], right[1][5:]))
    assert (second.logits - expected).abs().max() <= TOLERANCE


def test_the_decoder_keeps_nothing_between_calls_but_its_count() -> None:
    """Two functions over one decoder do not meet."""
    subject = make_subject("tinyllama")
    decoder = Decoder(subject.config, subject.decoder().kernels, dict(subject.weights))
    one, two = (Model(subject.config, decoder, "float32", CPU) for _ in range(2))
    tokens = prompt_of(20)
    alone, _ = in_pieces(subject.model(), tokens, [10])
    first, cache = one(tokens[:10])
    two(prompt_of(30, 9))
    second, _ = one(tokens[10:], cache)
    assert torch.equal(torch.cat((first, second)), alone)
    assert decoder.layer_tokens == (20 + 30) * subject.config.layers
