"""What a run tells of each step, against closed formulas, against transformers, and with faults planted."""

import time
from dataclasses import replace

import pytest
import torch

from tests.engines import assert_at_rest, held, settled
from tests.models import hybrids
from tests.models.fixtures import KINDS, make_checkpoint
from tests.tensors import kv_memory, tensor_decoder
from tests.trace.definition import row_of_run
from tokenwright import LLM, RequestError, SamplingParams
from tokenwright.backends.torch import observe as observe_module
from tokenwright.backends.torch.backend import TorchBackend
from tokenwright.backends.torch.border import tensor
from tokenwright.engine import FinishReason
from tokenwright.engine.layer_group import PageTable
from tokenwright.llm import run as run_module
from tokenwright.llm.run_trace import model_card
from tokenwright.models.taps import DIMS, Site
from tokenwright.trace import recorder as recorded_module
from tokenwright.trace.frame_codec import decode_weights, pack, unpack

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = [7, 3, 11, 5, 2, 9, 8]


@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind not in hybrids.CONFIGS])
def traced(request, tmp_path_factory):
    folder, oracle = make_checkpoint(tmp_path_factory.mktemp("traced") / request.param, request.param)
    with LLM(folder, weights="float32", pages=64, trace=True) as llm:
        yield llm, oracle


def shapes(llm):
    """P_b, P_lm and A(t) from the config alone, the masked half of a chunk counted (full attention's A)."""
    config = llm.config
    matrices = {n: s for n, s in llm.graph.shapes.items() if n.startswith("layers.") and len(s) == 2}
    every = sum(rows * columns for name, (rows, columns) in matrices.items() if ".experts." in name)
    block = sum(rows * columns for rows, columns in matrices.values())
    if config.mixture:
        block -= every // config.mixture.experts * (config.mixture.experts - config.mixture.chosen)
    head = config.width * config.vocab_size
    each = 2 * config.head_size if config.latent is None else 2 * config.latent.rank + config.latent.rope
    return block, head, 2 * config.heads * each * config.layers


def assert_read(graph, mixture, frame):
    """All matrices but a lookup table, padded to blocks, and their biases; of the experts those that some row chose."""
    matrices = [one for op in (*graph.blocks, graph.head) for one in op.matrices]
    sizes = {one.name: -(-one.out // 16) * 16 * -(-one.inner // 16) * 16 + one.bias * one.out for one in matrices}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    read = frame.weight_bytes // 4 - sum(sizes.values()) + experts
    if mixture is None:
        assert read == 0
        return
    layers = sum(mixture.layers)
    count, left = divmod(read, experts // (layers * mixture.experts))
    assert left == 0, "whole experts"
    least = layers * mixture.chosen
    assert least <= count <= min(least * frame.length, layers * mixture.experts)


def steps(run):
    while not run.ended:
        yield from run.step()


def test_counts_are_the_closed_formulas_with_the_cache_and_without(traced):
    llm, _ = traced
    block, head, slope = shapes(llm)
    kv, layers = llm.costs.bytes_per_token, llm.config.layers
    run = llm.run(PROMPT, GREEDY)
    for frame in steps(run):
        run.cache = frame.step not in (2, 3)  # off for steps 3 and 4
        t = frame.start + frame.length
        assert frame.seq_len == t + 1
        assert frame.cache is (frame.step not in (3, 4))
        expected = 0 if frame.step in (0, 3, 4, 5) else len(PROMPT) + frame.step - 1
        assert (frame.start, frame.length) == (expected, t - expected)
        assert frame.recomputed == (0 if frame.step in (0, 1, 2) else t - 1)
        assert frame.layer_tokens == frame.length * layers
        assert frame.flops == 2 * block * frame.length + 2 * head + slope * frame.length * t
        assert frame.flops_derived == llm.costs.chunk(frame.start, frame.length).flops
        assert frame.kv_written == frame.length * kv
        assert frame.kv_read == t * kv
        assert frame.kv_resident == (t * kv if frame.cache else 0)
        assert frame.kv_allocated == -(-t // 16) * 16 * kv
        assert_read(llm.graph, llm.config.mixture, frame)
    assert [frame.step for frame in run.frames] == list(range(6))
    assert run.reason is FinishReason.LENGTH


def test_a_row_is_what_transformers_attends_to(traced):
    llm, oracle = traced
    run = llm.run(PROMPT, GREEDY, layer=llm.config.layers - 1, head=llm.config.heads - 1)
    list(steps(run))
    oracle.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = oracle(torch.tensor([run.tokens[:-1]]), output_attentions=True).attentions
    for frame in run.frames:
        row, position = frame.attention, frame.start + frame.length - 1
        right = theirs[row.layer][0, row.head, position, : position + 1]
        assert (right - torch.tensor(decode_weights(row.codes))).abs().max() <= 0.004
        total = sum(decode_weights(row.codes))
        assert total <= 1.01 if llm.config.sink_logits else abs(total - 1) <= 0.01
        assert len(row.codes) == position + 1, "nothing beyond the row's own position"
        for layer, head in ((0, 0), (0, 1)):  # asked for afterwards, when the pages are gone
            again = run.attention(frame.step, layer, head)
            right = theirs[layer][0, head, position, : position + 1]
            assert (right - torch.tensor(decode_weights(again.codes))).abs().max() <= 0.004
            assert torch.allclose(torch.tensor(row_of_run(run, frame.step, layer, head)), right, atol=2e-5)


def contents(store):
    """All pages of a store, to the bit; not the scratch pages."""
    parts = [part for group, pages in enumerate(store.pages) for part in store.read(group, range(pages))]
    return [part.tobytes() for part in parts]


def test_looking_changes_nothing(traced):
    """Rows are asked for at every step, of every head: the text and the cache stay to the bit."""
    llm, _ = traced
    store = llm.engine.runner.runner.store
    run = llm.run(PROMPT, replace(GREEDY, max_tokens=4))
    while not run.ended:
        [frame] = run.step()
        held = contents(store)
        for step in range(frame.step + 1):
            run.attention(step, 1, 1)
        assert contents(store) == held
    [alone] = llm.generate([PROMPT], replace(GREEDY, max_tokens=4))
    assert alone.token_ids == run.completion.token_ids


def test_every_site_is_seen_with_its_dims(traced):
    llm, _ = traced
    config = llm.config
    layout = llm.graph.kv[0].layout
    sizes = {"T": 3, "d": config.width, "H": config.heads, "G": config.kv_heads, "m": config.mlp_width}
    sizes |= {"D": layout.key_size, "v": layout.value_size}
    seen = []

    def tap(site, layer, value):
        seen.append((site, layer))
        assert tuple(value.shape) == tuple(sizes[dim] for dim in DIMS[site])

    replay = llm.llm_engine.recording.replay
    replay.computed([1, 2, 3], 3, tap)
    inner = [site for site in Site if site not in (Site.EMBEDDING, Site.SINK_QUERY, Site.MERGED)]
    mixed = config.mixture.layers if config.mixture else [False] * config.layers
    each = ((site, layer) for layer in range(config.layers) for site in inner)
    expected = [(site, layer) for site, layer in each if not (mixed[layer] and site is Site.MLP_HIDDEN)]
    assert seen == [(Site.EMBEDDING, 0), *expected], "experts have no hidden numbers that all rows share"
    assert set(DIMS) == set(Site), "SINK_QUERY is seen where there are sinks"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder, _ = make_checkpoint(tmp_path_factory.mktemp("one") / "qwen2", "qwen2")
    with LLM(folder, pages=64, trace=True, token_budget=5) as llm:
        yield llm


def test_a_long_prompt_is_read_in_parts_and_each_part_has_its_frame(llm):
    run = llm.run(PROMPT, GREEDY)
    first = run.step()
    assert [(frame.start, frame.length, frame.token is None) for frame in first] == [(0, 5, True), (5, 2, False)]
    assert [frame.seq_len for frame in first] == [7, 8]
    assert first[0].candidates == () and len(first[1].candidates) == 20
    assert len(run.step()) == 1
    run.close()


def test_the_choice_is_told(llm):
    params = SamplingParams(temperature=0.8, top_k=5, seed=3, max_tokens=5, ignore_eos=True)
    run = llm.run(PROMPT, params)
    list(steps(run))
    logits, _ = llm.model(run.tokens)
    for frame in run.frames:
        if frame.token is None:
            continue
        row = tensor(logits[frame.seq_len - 2]).double()
        scores = row.log_softmax(-1)
        order = scores.argsort(descending=True)
        assert [candidate.token for candidate in frame.candidates[:5]] == order[:5].tolist()
        assert frame.logprob == pytest.approx(float(scores[frame.token]), abs=1e-4)
        assert frame.entropy == pytest.approx(float(-(scores.exp() * scores).sum()) / 0.6931471805599453, abs=1e-4)
        assert frame.rank == order.tolist().index(frame.token)
        wide = row
        kept = (wide / 0.8).masked_fill(wide < wide.topk(5).values[-1], -torch.inf).softmax(-1)
        for candidate in frame.candidates:
            assert candidate.sampled == pytest.approx(float(kept[candidate.token]), abs=1e-4)
        below = float(kept[: frame.token].sum())
        assert below - 1e-6 <= frame.uniform <= below + float(kept[frame.token]) + 1e-6


def test_neighbours_in_the_batch_are_counted_apart(traced):
    """Three runs and a text that nobody watches share their steps; each run tells what it tells alone."""
    llm, _ = traced
    texts = [PROMPT[:3], PROMPT[:5], PROMPT[:2]]
    alone = [[work(frame) for frame in steps(llm.run(text, GREEDY))] for text in texts]
    runs = [llm.run(text, GREEDY) for text in texts]
    with held(llm):
        stream = llm.stream(PROMPT, GREEDY)
        for run in runs:
            run._handle.resume()
    assert len(list(stream)) == 6
    engine = settled(llm)
    assert engine.pool.available == engine.pool.pages, "all went on together"
    assert [[work(frame("")) for frame in run._watch.frames] for run in runs] == alone


def test_another_head_chosen_in_the_middle_of_a_step_waits_for_the_next(llm):
    run = llm.run(PROMPT[:3], GREEDY, layer=0, head=0)
    recorder = llm.llm_engine.recording.recorder
    true = recorder.runner

    class Switching(Wrong):
        def observe(self, step, watched):
            found = true.observe(step, watched)
            run.watch(1, 3)
            return found

    recorder.runner = Switching(true, None)
    try:
        first = run.step()[-1]
        second = run.step()[-1]
    finally:
        recorder.runner = true
    assert [(f.attention.layer, f.attention.head) for f in (first, second)] == [(0, 0), (1, 3)]
    for frame in (first, second):
        right = row_of_run(run, frame.step, frame.attention.layer, frame.attention.head)
        ours = decode_weights(frame.attention.codes)
        assert max(abs(a - b) for a, b in zip(ours, right, strict=True)) <= 0.004
    run.close()


def test_what_looking_takes_is_not_part_of_the_step(llm, monkeypatch):
    row = recorded_module.coded

    def slow(*arguments):
        time.sleep(0.5)
        return row(*arguments)

    monkeypatch.setattr(recorded_module, "coded", slow)
    with llm.run(PROMPT[:3], GREEDY) as run:
        run.step()
        [frame] = run.step()
    assert frame.recording_us >= 500_000
    phases = frame.attention_us + frame.mlp_us + frame.head_us + frame.sampling_us
    assert phases <= frame.step_us < phases + 500_000


def test_a_row_that_cannot_be_computed_fails_nobody(llm, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("CUDA out of memory")

    runner = llm.engine.runner.runner
    monkeypatch.setattr(runner, "backend", TorchBackend(tensor_decoder(llm.loaded.decoder), runner.store))
    monkeypatch.setattr(observe_module, "attention_row", broken)
    with llm.run(PROMPT[:3], GREEDY) as run:
        [frame] = run.step()
    assert frame.attention is None and frame.candidates
    assert "could not be computed" in caplog.text


def test_old_rows_go_where_all_are_too_many_and_can_be_had_again(llm, monkeypatch):
    monkeypatch.setattr(run_module, "MOST_ROWS", 30)
    run = llm.run(PROMPT[:5], GREEDY)
    list(steps(run))
    kept = [frame.attention is not None for frame in run.frames]
    assert kept == sorted(kept) and kept[-1] and not kept[0]
    assert sum(len(frame.attention.codes) for frame in run.frames if frame.attention) <= 30
    assert run.attention(0, 0, 0).codes


def test_without_the_cache_a_text_read_in_parts_keeps_its_parts_until_the_last(llm):
    run = llm.run(PROMPT, GREEDY, cache=False)
    kv = llm.costs.bytes_per_token
    assert [frame.kv_resident for frame in run.step()] == [5 * kv, 0]
    run.close()


def test_a_traced_model_writes_for_those_who_do_not_look(llm):
    prompts = [[3, 4], [5], [6, 7, 8]]
    for completion in llm.generate(prompts, GREEDY):
        assert len(completion.token_ids) == 6


def work(frame):
    return frame.token, frame.start, frame.length, frame.flops, frame.kv_read, frame.kv_written, frame.attention


@pytest.mark.parametrize(
    "settings",
    [{}, {"presence_penalty": 1.5}, {"frequency_penalty": 1.0}, {"min_tokens": 9, "stop_ids": (5, 6, 7)}],
    ids=str,
)
def test_a_lost_run_goes_on_alike(llm, settings):
    few = tuple(range(5, 15))  # so that they recur
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True, allowed_ids=few, **settings)
    whole = llm.run(PROMPT, params)
    list(steps(whole))
    written = whole.completion.token_ids
    for cut in (1, 4, 8):
        rest = llm.run(PROMPT, params, written=written[:cut], first_step=100)
        list(steps(rest))
        assert rest.completion.token_ids == written[cut:] and rest.reason == whole.reason
        assert rest.frames[0].step == 100
        first = next(frame.step for frame in rest.frames if frame.token is not None)
        there = whole.frames[cut - 9].step
        torch.testing.assert_close(tensor(rest.adjusted_logits(first)), tensor(whole.adjusted_logits(there)))
        texts = "".join(frame.text for frame in whole.frames if frame.seq_len > len(PROMPT) + cut)
        assert "".join(frame.text for frame in rest.frames) == texts


def test_a_run_that_is_not_there_is_refused(llm):
    run = llm.run(PROMPT, GREEDY)
    run.step()
    with pytest.raises(RequestError, match="head must be from 0 to"):
        run.watch(0, 99)
    with pytest.raises(RequestError, match="layer must be from 0 to"):
        run.attention(0, -1, 0)
    with pytest.raises(RequestError, match="there is no step 8"):
        run.attention(7, 0, 0)
    with pytest.raises(RequestError, match="layer must be from"):
        llm.run(PROMPT, GREEDY, layer=50)
    run.close()
    assert_at_rest(llm)


def test_without_trace_there_is_no_run(tmp_path):
    folder, _ = make_checkpoint(tmp_path / "m", "qwen2")
    with LLM(folder, pages=8) as plain, pytest.raises(RequestError, match="trace=True"):
        plain.run(PROMPT)


def test_a_held_run_writes_nothing_while_others_turn_the_engine(llm):
    with llm.run(PROMPT, GREEDY) as run:
        run.step()
        tokens = run.tokens
        llm.generate([PROMPT], GREEDY)
        assert run.tokens == tokens


# Planted faults: a runner that computes something else. Each must move what is told beyond what is tolerated.


class Wrong:
    """A runner with a fault in the steps it is given. It is looked at as the true one is."""

    def __init__(self, runner, fault):
        self.runner, self.store, self.fault = runner, runner.store, fault

    def observe(self, step, watched):
        return self.runner.observe(replace(step, chunks=tuple(map(self.fault, step.chunks))), watched)


def shifted(chunk):
    """Decode steps at a position too far, where the text has a page for that."""
    if chunk.start == 0 or not all(chunk.stop // 16 in table for table in chunk.sequence.tables):
        return chunk
    sequence = replace(chunk.sequence, tokens=[0, *chunk.sequence.tokens])
    return replace(chunk, sequence=sequence, start=chunk.start + 1, stop=chunk.stop + 1)


def stale(chunk):
    """A decode step that reads its first page from a page of nobody."""
    tables = [PageTable({**table, 0: 60}) for table in chunk.sequence.tables]
    return replace(chunk, sequence=replace(chunk.sequence, tables=tables)) if chunk.start else chunk


class Twice(Wrong):
    """Does the work of all layers twice."""

    def observe(self, step, watched):
        _, first = self.runner.observe(step, watched)
        output, second = self.runner.observe(step, watched)
        return output, replace(second, layer_flop=first.layer_flop + second.layer_flop)


class Repeats(Wrong):
    """Tells the candidates of its first step at every later one."""

    def observe(self, step, watched):
        output, observed = self.runner.observe(step, watched)
        for row in watched:
            self.fault = row.highest = self.fault or row.highest
        return output, observed


@pytest.mark.parametrize("fault", [shifted, stale])
def test_a_planted_fault_shows_in_the_rows(tmp_path, fault):
    folder, _ = make_checkpoint(tmp_path / "m", "qwen2")
    with LLM(folder, pages=64, trace=True) as llm:
        recorder = llm.engine.runner
        for tensor in kv_memory(recorder.runner.store, 0):
            tensor.fill_(0.5)  # what nobody wrote must be numbers, for the fault to show in the rows
        recorder.runner = Wrong(recorder.runner, fault)
        worst = 0.0
        for layer in range(llm.config.layers):
            run = llm.run(list(range(2, 22)), GREEDY, layer=layer, head=0)
            for frame in steps(run):
                right = torch.tensor(row_of_run(run, frame.step, layer, 0))
                codes = frame.attention.codes[: len(right)]
                worst = max(worst, float((right - torch.tensor(decode_weights(codes))).abs().max()))
        assert worst > 0.004


def test_a_planted_fault_shows_in_the_counts(tmp_path):
    folder, _ = make_checkpoint(tmp_path / "m", "qwen2")
    with LLM(folder, pages=64, trace=True) as llm:
        recorder = llm.engine.runner
        recorder.runner = Twice(recorder.runner, None)
        block, head, slope = shapes(llm)
        run = llm.run(PROMPT, GREEDY, cache=False)
        run.step()
        [frame] = run.step()
        t = frame.seq_len - 1
        assert frame.flops != 2 * block * t + 2 * head + slope * t * t
        assert frame.flops > 1.5 * frame.flops_derived


@pytest.mark.parametrize("kind", hybrids.CONFIGS)
def test_a_model_with_states_is_counted_as_it_runs_and_not_replayed(kind, tmp_path):
    folder, _ = make_checkpoint(tmp_path / kind, kind)
    with LLM(folder, weights="float32", pages=64, trace=True) as llm:
        run = llm.run(PROMPT, GREEDY, layer=llm.graph.recurrent[0])
        for frame in steps(run):
            derived = llm.costs.chunk(frame.start, frame.length)
            assert (frame.kv_read, frame.kv_written) == (derived.kv_read, derived.kv_written)
            assert set(frame.attention.codes) == {0}, "such a layer attends to nothing"
            assert unpack(pack(frame)).layers == frame.layers
            assert frame.attention_us > 0 and frame.attention_us + frame.mlp_us + frame.head_us <= frame.step_us
            assert min(half for layer in frame.layers for half in (layer.attention_us, layer.mlp_us)) >= 0
        with pytest.raises(RequestError, match="cannot be replayed"):
            run.heads(0)
        card = model_card(llm.llm_engine, kind)
        assert tuple(i for i, window in enumerate(card.windows) if window == 0) == llm.graph.recurrent
        kept = frame.kv_resident - (frame.start + frame.length) * card.kv_bytes_per_token
        assert kept == card.state_bytes > 0, "what is kept is K and V of every token, and one state"
        child = llm.fork(run, 3)
        list(steps(child))
        assert child.tokens == run.tokens
