"""Beam search against transformers' own: the same texts and the same scores.

A case counts where no two candidates that could change places are nearer than MARGIN; the others are shown as a share.
An end token is made likely by a bias, which both sides add to its log-probabilities.
"""

from dataclasses import dataclass
from itertools import pairwise, product

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.engine.invariants import check_invariants
from tests.oracle.harness import make_subject, prompt_of, subject_of
from tests.pairwise import pairwise as every_two
from tests.profiles import some
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.checkpoints.files.local import STORIES
from tokenwright.decode import BeamSearch, RowSampler, TextStopChecker
from tokenwright.decode.beam import Hypothesis
from tokenwright.engine import Engine, Failed, FinishReason, Request, SamplingParams, TokenConstraints

MARGIN = 2e-5
NEW = 14
BEAMS, PENALTIES, STOPPING = (2, 4, 8), (-1.0, 0.0, 1.0, 2.0), (True, False, "never")


class Silent:
    """A sink that makes no text."""

    stopped = None

    def push(self, token, armed=True):
        return ""

    def finish(self):
        return ""

    def fork(self):
        return self


class Watched(BeamSearch):
    """Notes how near to each other the candidates were that could have changed places."""

    nearest = float("inf")

    def _candidates(self, table, ends):
        found = super()._candidates(table, ends)
        scores = [candidate.score for candidate in found]
        gaps = [above - below for above, below in pairwise(scores)]
        self.nearest = min([self.nearest, *gaps])
        return found


def search(engine: Engine, prompt, ends, *, cache: bool = True, salt: bytes = b"", **options) -> Watched:
    params = SamplingParams(**{"max_tokens": NEW, "n": options["beams"]} | options)
    found = Watched(params, TextStopChecker(Silent(), ends))
    constraints = TokenConstraints(end_ids=frozenset(ends))
    request = Request(
        tuple(prompt), params, found, cache=cache, salt=salt, constraints=constraints, width=params.beams, search=found
    )
    engine.submit(request)
    while engine.busy:
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
    check_invariants(engine.scheduler)
    assert engine.pool.available == engine.pool.pages
    return found


def written(found: Hypothesis) -> list[int]:
    return [node.token for node in found.node.path()]


def theirs(model, prompt, ends, bias: float, beams: int, penalty: float, stopping):
    config = GenerationConfig(
        max_new_tokens=NEW,
        num_beams=beams,
        num_return_sequences=beams,
        length_penalty=penalty,
        early_stopping=stopping,
        eos_token_id=list(ends),
        pad_token_id=model.config.vocab_size - 1,
        sequence_bias={(end,): bias for end in ends} if bias else None,
        do_sample=False,
        temperature=1.0,
        top_p=1.0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    with torch.no_grad():
        out = model.generate(torch.tensor([list(prompt)]), generation_config=config)
    rows = out.sequences[:, len(prompt) :].tolist()
    return [cut(row, ends) for row in rows], out.sequences_scores.tolist()


def cut(row, ends):
    """A text up to its first end token: what follows is padding."""
    return next((row[: place + 1] for place, token in enumerate(row) if token in ends), row)


@dataclass
class Tally:
    """The searches of one model that were compared. `early`: texts that an end token ended."""

    cases: int = 0
    qualified: int = 0
    hypotheses: int = 0
    early: int = 0

    def compare(self, engine: Engine, model, prompt, ends, bias: float, beams: int, penalty: float, stopping) -> None:
        case = f"{beams} beams, penalty {penalty}, early stopping {stopping}"
        options = {"length_penalty": penalty, "early_stopping": stopping, "beams": beams}
        found = search(engine, prompt, ends, logit_bias=dict.fromkeys(ends, bias), **options)
        best = found.best(beams)
        self.cases += 1
        self.hypotheses += len(best)
        self.early += sum(one.reason is FinishReason.EOS and one.node.depth < NEW for one in best)
        scores = [one.score for one in best]
        if min([found.nearest, *(a - b for a, b in pairwise(scores))]) < MARGIN:
            return
        self.qualified += 1
        texts, values = theirs(model, prompt, ends, bias, beams, penalty, stopping)
        assert [written(one) for one in best] == texts, case
        tolerance = 1e-4 * max(1.0, NEW**-penalty)  # of the sums, which transformers keeps in fp32
        assert scores == pytest.approx(values, abs=tolerance), case


@pytest.fixture(scope="module")
def stories():
    return subject_of(STORIES, AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32).eval(), "stories")


@pytest.mark.parametrize("kind", ["llama3", "gpt2", "qwen2-window", "stories"])
def test_beam_search_is_transformers(kind, stories):
    """The bias makes an end token likely enough to end a good part of the beams early, and not all at once."""
    inside = kind == "stories"
    subject = stories if inside else make_subject(kind)
    tally = Tally()
    for beams, penalty, stopping in some(list(product(BEAMS, PENALTIES, STOPPING)), 5):
        prompt = [0, 300, 301, 302] if inside else prompt_of(5 + beams, beams)
        ends = (1, 4) if inside else (2, 4)
        tally.compare(
            subject.engine(RowSampler(), kernels=find_kernels()),
            subject.oracle,
            prompt,
            ends,
            4.0,
            beams,
            penalty,
            stopping,
        )
    assert tally.qualified >= 0.9 * tally.cases
    assert tally.early >= 0.3 * tally.hypotheses


@pytest.mark.parametrize("kind", ["llama3", "gpt2", "stories"])
def test_one_beam_is_the_greedy_text(kind, stories):
    subject = stories if kind == "stories" else make_subject(kind)
    prompt, ends = prompt_of(7), (2, 4)
    found = search(subject.engine(RowSampler()), prompt, ends, beams=2, n=1, max_tokens=1)
    with torch.no_grad():
        row = subject.oracle(torch.tensor([list(prompt)])).logits[0, -1]
    assert written(found.best(1)[0]) == [int(row.argmax())]


WIDE = ReferenceKernels(wide=torch.float64)  # no rounding of sums turns a code of the cache over


CACHES = [("int8", None, 0), ("native", 6, 0), ("int4", 7, 2), ("fp8", 5, 1)]  # a format, a window, and sinks


@pytest.mark.parametrize(("kind", "kept", "beams"), every_two(["llama3", "qwen2-window"], CACHES, [4, 6]))
def test_with_any_cache_it_is_its_own_uncached_search(kind, kept, beams):
    subject = make_subject(kind)
    specs, options = subject.specs(*kept), {"beams": beams, "max_tokens": 8}
    ways = []
    for cache, more in ((True, {}), (False, {}), (True, {"token_budget": beams})):
        engine = subject.engine(RowSampler(), specs=specs, kernels=WIDE, page_size=4, **more)
        ways.append(search(engine, prompt_of(9), (2, 4), cache=cache, logit_bias={2: 3.0}, **options))
    texts = [[written(one) for one in way.best(beams)] for way in ways]
    assert texts[0] == texts[1] == texts[2]
    for way in ways[1:]:
        assert [one.score for one in way.best(beams)] == pytest.approx(
            [one.score for one in ways[0].best(beams)], abs=1e-9
        )
