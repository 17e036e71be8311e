"""Runs that fork: they go on from an earlier step on the same pages, and their logits are held for other samplers."""

import numpy as np
import pytest

from tests.engine.invariants import check_invariants
from tests.engines import settled
from tests.models.fixtures import make_checkpoint
from tokenwright import LLM, Grammar, RequestError, SamplingParams
from tokenwright.trace.recorder import HeldLogits

DRAWN = {"temperature": 1.0, "seed": 5, "max_tokens": 40, "ignore_eos": True}
PROMPT = list(range(2, 22))


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder, _ = make_checkpoint(tmp_path_factory.mktemp("m") / "qwen2", "qwen2")
    with LLM(folder, pages=64, trace=True) as llm:
        yield llm


def written(run, steps):
    for _ in range(steps):
        run.step()
    return run.tokens


def alone(llm, prompt, tokens, count):
    """The logits after each of `count` further tokens, of a run that shares nothing."""
    run = llm.run(prompt, written=tokens, **DRAWN)
    text = written(run, count)
    found = [run.logits(frame.step) for frame in run.frames]
    run.close()
    return text, found


@pytest.mark.parametrize("step", [0, 3, 11, 14])
@pytest.mark.parametrize("ended", [False, True], ids=["live", "ended"])
def test_a_fork_writes_what_a_run_of_its_own_would(llm, step, ended):
    parent = llm.run(PROMPT, **DRAWN)
    before = written(parent, 15)
    if ended:
        parent.close()
    forced = (before[20 + step] + 1) % llm.config.vocab_size
    child = llm.fork(parent, step, forced)
    assert child.tokens == (*before[: 20 + step], forced) and child.first_step == step + 1
    if not ended:
        [use, theirs] = child.pages([parent])
        pages = -(-(20 + step) // 16)
        assert (use.pages, use.shared, theirs.shared) == (pages, pages, pages)
        assert use.shared_bytes == pages * 16 * llm.costs.bytes_per_token
    text = written(child, 12)
    assert child.frames[0].start == child.sequence.counts.reused
    assert child.frames[0].start == (20 + step if not ended else child.frames[0].start) >= 16
    expected, logits = alone(llm, PROMPT, [*before[20 : 20 + step], forced], 12)
    assert text == expected
    assert all(np.array_equal(child.logits(frame.step), row) for frame, row in zip(child.frames, logits, strict=True))
    if not ended:
        after = written(parent, 10)
        assert after[:35] == before and after == alone(llm, PROMPT, [], 25)[0], "the parent goes on undisturbed"
        assert all(np.array_equal(parent.logits(n), row) for n, row in enumerate(alone(llm, PROMPT, [], 25)[1]))
    for run in (child, parent):
        run.close()
    pool = settled(llm).pool
    assert pool.available == pool.pages


def test_a_fork_that_is_closed_before_its_first_step_leaves_its_parents_pages_found_by_their_text():
    """Another text then takes nearly all pages; the parent's text is gone on from as if there had been no fork."""
    greedy = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    with LLM("stories", trace=True, page_size=8, pages=12) as llm:
        with llm.run("Once upon a time", **greedy) as parent:
            right = written(parent, 40)
        with llm.run("Once upon a time", **greedy) as parent:
            written(parent, 20)
            llm.fork(parent, 9).close()
            check_invariants(settled(llm).scheduler)
        llm.generate([[100 + 7 * k for k in range(86)]], temperature=0.0, max_tokens=2)
        with llm.fork(parent, 18) as again:
            assert written(again, 40) == right


def test_a_rewind_keeps_the_token_and_may_change_the_settings(llm):
    with llm.run(PROMPT, **DRAWN) as parent:
        before = written(parent, 10)
        with llm.fork(parent, 4) as child:
            assert written(child, 5) == before, "the same seed and settings"
        with llm.fork(parent, 4, temperature=0.0) as child:
            assert written(child, 1)[:25] == before[:25]
            assert child.tokens[25] == int(child.logits(5).argmax())


def test_a_fork_of_a_fork_shares_with_both(llm):
    with llm.run(PROMPT, **DRAWN) as parent:
        before = written(parent, 20)
        with llm.fork(parent, 15, 7) as child:
            written(child, 10)
            with llm.fork(child, 18, 9) as grandchild:
                assert written(grandchild, 1)[:36] == (*before[:35], 7)
                use = grandchild.pages()[0]
                assert use.shared == 2, "the two pages that all three have"


def test_what_cannot_be_gone_on_from_is_refused(llm):
    with llm.run(PROMPT, temperature=0.0, max_tokens=4) as run:
        written(run, 4)
        for step, token, why in [
            (9, None, "there is no step 10"),
            (3, 5, "max_tokens is 4, which step 4 reaches"),
            (1, min(llm.eos_ids), "the text ends with the token"),
            (1, llm.config.vocab_size, "token ids must be from 0"),
        ]:
            with pytest.raises(RequestError, match=why):
                llm.fork(run, step, token)
        with llm.fork(run, 3, 5, max_tokens=6) as child:
            assert child.tokens[-1] == 5
    assert settled(llm).pool.available == 64


@pytest.mark.parametrize("several", [{"n": 2}, {"best_of": 2}, {"beams": 2}], ids=str)
def test_a_fork_follows_one_text(llm, several):
    drawn = {"temperature": 0.0 if "beams" in several else 1.0, "max_tokens": 4, "ignore_eos": True}
    with llm.run(PROMPT, **drawn) as run:
        written(run, 2)
        with pytest.raises(RequestError, match="a run follows one text"):
            llm.fork(run, 1, **several)


def test_a_run_is_forked_by_its_own_llm(llm):
    with LLM(llm.loaded, pages=64) as other, llm.run(PROMPT, **DRAWN) as run:
        written(run, 4)
        with pytest.raises(RequestError, match="another LLM's"):
            other.fork(run, 2)
        assert settled(other).pool.available == 64
    with pytest.raises(RequestError, match="this LLM is closed"):
        other.fork(run, 2)


def test_logits_of_a_row_alone_are_held_without_a_copy_and_the_oldest_go_first():
    rows = [np.full(100, n, np.float32) for n in range(4)]
    several = np.stack(rows)
    kept = HeldLogits(most=1000)  # bytes: two rows and a half
    for step, row in enumerate(rows):
        kept.add(step, row, alone=True)
    assert (kept.first, kept.nbytes) == (2, 800) and kept.get(1) is None
    assert np.shares_memory(kept._rows[3], rows[3]) and not np.shares_memory(kept.get(3), rows[3])
    kept.add(3, several[1], alone=False)  # a second attempt at the step, in a batch
    several[:] = 0
    assert kept.nbytes == 800 and np.array_equal(kept.get(3), rows[1])
    kept.most = 0
    kept.add(4, rows[0], alone=True)
    assert (kept.first, kept.nbytes) == (4, 400), "the newest is held in any case"


def test_the_logits_are_adjusted_as_any_parameters_ask(llm):
    few = tuple(range(5, 25))
    wanted = {"bad_words": ["the"], "min_tokens": 30, "stop_ids": (7,), "allowed_ids": few, "presence_penalty": 1.0}
    wanted |= {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_breakers": ["!"], "ignore_eos": False}
    with llm.run(PROMPT, **DRAWN) as run, llm.run(PROMPT, **{**DRAWN, **wanted}) as other:
        written(run, 6), written(other, 1)
        own = SamplingParams(**{**DRAWN, **wanted})
        assert np.array_equal(run.adjusted_logits(0, own), other.adjusted_logits(0))
        assert np.array_equal(run.adjusted_logits(0), run.logits(0))
        the = [llm.tokenizer.encode(word, add_special=False)[-1] for word in ("the", " the")]
        for settings, banned in [({"bad_words": ["the"]}, the), ({"min_tokens": 7, "stop_ids": (7, 8)}, [7, 8])]:
            row = run.adjusted_logits(5, SamplingParams(ignore_eos=True, **settings))
            assert np.flatnonzero(np.isinf(row)).tolist() == sorted(banned)
        with pytest.raises(RequestError, match="the model's ids are 0 to"):
            run.adjusted_logits(5, SamplingParams(banned_ids=(llm.config.vocab_size,)))
        with pytest.raises(RequestError, match="without a grammar"):
            run.adjusted_logits(5, SamplingParams(grammar=Grammar.regex("[a-z]+")))
    with llm.run(PROMPT, temperature=1.0, grammar=Grammar.regex("[a-z ]+")) as run:
        written(run, 1)
        with pytest.raises(RequestError, match="without a grammar"):
            run.adjusted_logits(0)
        assert np.array_equal(run.adjusted_logits(0, SamplingParams()), run.logits(0))


def test_a_step_whose_logits_are_gone_says_from_where_on_they_are_there(llm, monkeypatch):
    with llm.run(PROMPT, **DRAWN) as run:
        run._watch.held.most = 3 * 4 * llm.config.vocab_size
        written(run, 6)
        assert run.logits(3).shape == (llm.config.vocab_size,)
        with pytest.raises(RequestError, match="step 3 are no longer held; from step 4"):
            run.logits(2)
