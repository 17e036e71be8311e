"""The engine in one file generates the tokens of the real engine, whatever is scheduled, preempted and evicted."""

import ast
import importlib.util
import json
import math
import random
import sys
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.models.fixtures import make_checkpoint
from tests.profiles import share
from tokenwright import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "one_file_engine.py"
STORIES = ROOT / "src" / "tokenwright" / "stories"
SCHEDULES = {"llama3": 175, "stories": 25}  # a small random model with peaked attention, and the bundled one
TOLERANCE = 1e-4  # of logits and logprobs: both engines sum in fp32, in different orders; 4e-5 was measured
NUDGE = 1e-5  # a draw is a tie if moving its number or top_p by this much changes it
MOST_TIES = 3  # of about 900 sequences

spec = importlib.util.spec_from_file_location("one_file_engine", FILE)
one = importlib.util.module_from_spec(spec)
spec.loader.exec_module(one)


@dataclass
class Schedule:
    """Requests with the step before which each arrives, and the sizes of an engine that has few pages for them."""

    arrivals: list[int]
    prompts: list[list[int]]
    samplings: list
    sizes: dict[str, int]


def schedule(seed, vocabulary):
    """Prompts of the same few blocks in any order: equal prefixes, and equal pages behind different prefixes."""
    r = random.Random(seed)
    blocks = [[r.randrange(5, vocabulary) for _ in range(8)] for _ in range(3)]
    prompts, samplings = [], []
    for _ in range(r.randint(3, 6)):
        prompt = [token for block in r.choices(blocks, k=r.randint(0, 3)) for token in block]
        prompts.append(prompt + [r.randrange(5, vocabulary) for _ in range(r.randint(not prompt, 5))])
        temperature, top_p = r.choice([0.0, 0.0, 0.7, 1.0, 1.4]), r.choice([1.0, 0.95, 0.6])
        samplings.append(one.Sampling(temperature, top_p, r.getrandbits(64), r.randint(1, 16)))
    page_size = r.choice([2, 3, 4, 8])
    longest = max(len(prompt) + how.max_tokens for prompt, how in zip(prompts, samplings, strict=True))
    pages = -(-longest // page_size) + r.randint(0, 12 // page_size)
    budget = r.choice([2, 8, 24, 64])
    arrivals = sorted(r.randint(0, 6) for _ in prompts)
    return Schedule(arrivals, prompts, samplings, {"pages": pages, "page_size": page_size, "token_budget": budget})


def write(model, its, monkeypatch, seen):
    """The completions of a schedule, each with the rows of logits that its tokens were chosen from."""
    engine, rows, pick = one.Engine(model, **its.sizes), {}, one.pick

    def recorded(chunks, logits):
        seen["batches"] += len(chunks) > 1
        for (sequence, _, stop), row in zip(chunks, logits, strict=True):
            if stop == len(sequence.tokens):
                rows[sequence, stop] = row
            else:
                seen["chunks of prompts"] += 1
        return pick(chunks, logits)

    with monkeypatch.context() as patch:
        patch.setattr(one, "pick", recorded)
        sequences = run(engine, its)
    assert len(engine.pool.available) == engine.pool.pages, "pages were left behind"
    seen["reused"] += engine.scheduler.reused
    seen["preemptions"] += engine.scheduler.preemptions
    seen["evictions"] += engine.pool.evictions
    for sequence, prompt in zip(sequences, its.prompts, strict=True):
        positions = range(len(prompt), len(sequence.tokens))
        yield sequence.tokens[len(prompt) :], [rows[sequence, position] for position in positions]


def run(engine, its):
    """Add each request before its step, and compute all; check the invariants after every step."""
    queue = deque(zip(its.arrivals, its.prompts, its.samplings, strict=True))
    sequences, scheduler, step = [], engine.scheduler, 0
    while queue or scheduler.running or scheduler.waiting:
        while queue and queue[0][0] <= step:
            _, prompt, how = queue.popleft()
            sequences.append(engine.add(prompt, how))
        if scheduler.running or scheduler.waiting:
            engine.step()
            scheduler.check()
        step += 1
    return sequences


def tied(row, how, position, tokens):
    """Whether rounding explains that two engines chose these two tokens from this row of logits [V]."""
    if how.temperature == 0:
        return row.max() - row[tokens].min() < TOLERANCE
    number = one.uniform(how.seed, position)
    numbers = [min(max(number + by, 0.0), 1 - NUDGE) for by in (-NUDGE, 0.0, NUDGE)]
    cuts = [how.top_p + by for by in (-NUDGE, 0.0, NUDGE)] if how.top_p < 1 else [1.0]
    return {one.sample(row, how._replace(top_p=cut), moved) for cut in cuts for moved in numbers}.issuperset(tokens)


def compare(answer, rows, start, how, completion, seen):
    """Compare two completions up to the first tie, after which the sequences differ."""
    for n, (token, other) in enumerate(zip(answer, completion.token_ids, strict=False)):
        if token != other:
            assert tied(rows[n], how, start + n, [token, other]), (n, answer, completion.token_ids, how)
            seen["ties"] += 1
            return
        logprob = math.log(one.softmax(rows[n].astype(np.float64))[token])
        assert logprob == pytest.approx(completion.logprobs[n], abs=TOLERANCE)
    assert answer == list(completion.token_ids)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {"llama3": make_checkpoint(tmp_path_factory.mktemp("one") / "model", "llama3")[0], "stories": STORIES}


@pytest.mark.parametrize("name", SCHEDULES)
def test_random_schedules_equal_the_real_engine(name, folders, monkeypatch):
    seen, rounds = Counter(), share(SCHEDULES[name])
    model = one.Llama(folders[name])
    with LLM(folders[name], dtype="float32") as llm:
        for seed in range(rounds):
            its = schedule(seed, len(model.weights["embed_tokens"]))
            with LLM(llm.loaded, **its.sizes) as real:
                completions = real.generate(its.prompts, [SamplingParams(**how._asdict()) for how in its.samplings])
            seen["preemptions of the real engine"] += sum(each.usage.preemptions for each in completions)
            written = write(model, its, monkeypatch, seen)
            for (answer, rows), prompt, how, done in zip(written, its.prompts, its.samplings, completions, strict=True):
                compare(answer, rows, len(prompt), how, done, seen)
    assert seen.pop("ties", 0) <= MOST_TIES
    assert len(seen) == 6 and min(seen.values()) >= rounds // 4, f"the schedules are too easy: {seen}"


def test_logits_equal_the_real_model(monkeypatch):
    """All V logits after each chunk: of the prompt, and of every token after it."""
    engine, rows, pick = one.Engine(one.Llama(STORIES), pages=16, page_size=4, token_budget=7), {}, one.pick
    monkeypatch.setattr(
        one, "pick", lambda chunks, logits: rows.update({chunks[0].stop: logits[0]}) or pick(chunks, logits)
    )
    sequence = engine.add([0, *(random.Random(1).randrange(5, 4096) for _ in range(39))], one.Sampling(max_tokens=12))
    while engine.scheduler.running or engine.scheduler.waiting:
        engine.step()
    with LLM(STORIES, dtype="float32") as llm:
        expected, _ = llm.model(sequence.tokens)
    assert list(rows)[:8] == [7, 14, 21, 28, 35, 40, 41, 42]
    for stop, row in rows.items():
        np.testing.assert_allclose(row, expected[stop - 1], rtol=0, atol=TOLERANCE)


def test_it_prints_stories(capsys, monkeypatch):
    prompts = ["Once upon a time", "One day, a cat"]
    monkeypatch.setattr("sys.argv", [FILE.name, *prompts, "--max-tokens", "24", "--seed", "4"])
    one.main()
    with LLM(STORIES, dtype="float32") as llm:
        expected = llm.generate(prompts, SamplingParams(temperature=0.7, top_p=0.95, seed=4, max_tokens=24))
    *stories, counts = capsys.readouterr().out.strip().split("\n\n")
    assert "\n\n".join(stories) == "\n\n".join(
        prompt + each.text for prompt, each in zip(prompts, expected, strict=True)
    )
    assert counts == "0 tokens reused, 0 preemptions, 0 evictions"


def test_the_uniform_numbers_are_those_of_philox():
    for seed, position in ((0, 0), (1, 63), (2**64 - 1, 64), (12345678901234567890, 2**40)):
        bits = np.random.Philox(key=seed, counter=position).random_raw()
        assert one.uniform(seed, position) == (bits >> 11) * 2.0**-53


@pytest.mark.parametrize(("length", "new"), [(0, 4), (4, 0), (30, 3), (2000, 1)])
def test_a_request_that_can_never_run_is_refused(length, new):
    engine = one.Engine(one.Llama(STORIES), pages=8, page_size=4)
    with pytest.raises(ValueError, match=rf"cannot continue {length} tokens"):
        engine.add([5] * length, one.Sampling(max_tokens=new))
    assert not engine.scheduler.waiting


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("qwen2", {}, "model_type of .* is qwen2; this file computes llama only"),
        ("llama3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling is yarn"),
        ("llama3", {"hidden_act": "gelu"}, "hidden_act of .* is gelu; this file computes silu only"),
    ],
)
def test_a_model_that_it_cannot_compute_is_refused(kind, changes, problem, tmp_path):
    folder, _ = make_checkpoint(tmp_path / "model", kind)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=problem):
        one.Llama(folder)


def test_free_pages_go_first_then_the_cached_ones_by_age_and_from_the_end_of_a_text():
    pool = one.Pool(pages=5, page_size=2)
    older, younger = [pool.allocate(), pool.allocate()], [pool.allocate(), pool.allocate()]
    first, second, third, unfilled = *older, *younger
    for page in (first, second, third):
        pool.cache(page, b"hash %d" % page)
    pool.release(older)
    pool.release(younger)
    assert [pool.allocate() for _ in range(5)] == [unfilled, 4, second, first, third]
    assert pool.evictions == 3


@pytest.mark.parametrize("fault", ["lost", "counted twice", "two hashes"])
def test_the_check_finds_faults_of_the_pool(fault):
    pool = one.Pool(pages=4, page_size=2)
    pages = [pool.allocate(), pool.allocate()]
    pool.cache(pages[0], b"hash")
    pool.check([pages])
    match fault:
        case "lost":
            pool.available.popitem()
        case "counted twice":
            pool.refcounts[pages[0]] += 1
        case "two hashes":
            pool.hash_of[pages[0]] = b"another"
    with pytest.raises(AssertionError):
        pool.check([pages])


def test_it_is_one_short_file():
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    nodes = list(ast.walk(ast.parse(text)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    outside = {name.split(".")[0] for name in imported} - sys.stdlib_module_names
    assert outside == {"numpy", "tokenizers"}
