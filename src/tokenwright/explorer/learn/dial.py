"""Challenges of the cards on sampling and on training: sampler, beams, steer."""

import math

import numpy as np

from tokenwright.decode.sampler import choose, probabilities
from tokenwright.engine import SamplingParams
from tokenwright.errors import RequestError
from tokenwright.explorer.learn.challenge import STORY, ChallengeAnswer, Figures, challenge, number, quoted, text, whole
from tokenwright.explorer.learn.work import CheckWork
from tokenwright.explorer.panels.learn import Checked
from tokenwright.llm.outputs import Completion

BITS, NEAR, RANK = 2.0, 0.05, 5
BEAMS, WRITTEN, GAIN = 4, 32, 1.0
START, TARGET, STEERED = "The opposite of big is", " night", 8


@challenge(
    "dial",
    "Sampler by numbers",
    f"Set the dial so that the next token after a story of ours has {BITS:g} bits of entropy; then find a seed "
    f"that draws an id of rank {RANK} or more (1 is the most probable).",
    lambda _: f"entropy within {NEAR} bit of {BITS:g}; rank at least {RANK}",
    number("temperature", "temperature", 1.0, 0.01, 100),
    number("top_p", "top-p", 1.0, 0.01, 1),
    whole("seed", "seed", "", 0, 2**32),
)
def sampler(work: CheckWork, answer: ChallengeAnswer) -> Checked:
    figures, ids = Figures(), work.ids(STORY)
    temperature, top_p, seed = answer.number("temperature"), answer.number("top_p"), answer.whole("seed")
    row = work.logits(ids)[-1]
    chances = probabilities(row, SamplingParams(temperature=temperature, top_p=top_p))
    assert chances is not None, "the temperature is above 0"
    kept = chances[chances > 0]
    entropy = float(-(kept * np.log2(kept)).sum())
    [token] = choose(row, chances, seed, len(ids))
    rank = 1 + int((row > row[token]).sum())
    figures.read("entropy", "entropy", entropy, "bit", "-sum p log2 p of the distribution that is drawn from")
    figures.counted("kept", "ids left", len(kept), "", "with a probability above 0")
    figures.counted(
        "token", "drawn", quoted(work.llm, [token]), "", f"by seed {seed}, as token {len(ids) + 1} of the text"
    )
    figures.counted("rank", "its rank", rank, "", "1 is the most probable")
    why = ""
    if abs(entropy - BITS) > NEAR:
        turn = "Turn the temperature up, or cut less." if entropy < BITS else "Turn the temperature down, or cut more."
        why = f"The entropy is {entropy:.2f} bits, not {BITS:g}. {turn}"
    elif rank < RANK:
        why = f"The entropy is right. Seed {seed} draws rank {rank}: try other seeds, or keep more ids."
    return figures.verdict("sampler", why, f"{entropy:.2f} bits, and this seed draws the id of rank {rank}.")


def _total(written: Completion) -> float:
    return sum(written.logprobs)


@challenge(
    "dial",
    "Beat greedy",
    "Greedy takes the likeliest token each time, and may end in an unlikely text. Write an opening where four "
    "beams find a better one.",
    lambda _: f"{BEAMS} beams, {WRITTEN} tokens: at least {GAIN:g} nat more than greedy",
    text("prompt", "opening", "", 400),
)
def beams(work: CheckWork, answer: ChallengeAnswer) -> Checked:
    figures, ids = Figures(), work.ids(answer.text("prompt"))
    if len(ids) + WRITTEN > work.context:
        raise RequestError(f"the opening leaves no room for {WRITTEN} tokens; shorten it")
    params = SamplingParams(temperature=0.0, max_tokens=WRITTEN, ignore_eos=True)
    search = SamplingParams(beams=BEAMS, max_tokens=WRITTEN, ignore_eos=True)
    with work.engine(len(ids) + WRITTEN, texts=2 * BEAMS) as llm:
        greedy, best = work.text(llm, ids, params), work.beams(llm, ids, search)
    gain = _total(best) - _total(greedy)
    pairs = zip(greedy.token_ids, best.token_ids, strict=False)
    parted = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
    figures.read("greedy", "greedy", _total(greedy), "nat", f"log p of {WRITTEN} tokens, end tokens like others")
    figures.read("beam", f"beam {BEAMS}", _total(best), "nat", f"log p of {WRITTEN} tokens")
    figures.read("gain", "gain", gain, "nat", "beam - greedy")
    figures.given("greedy_text", "greedy wrote", quoted(work.llm, greedy.token_ids), "", "")
    figures.given("beam_text", "the beam wrote", quoted(work.llm, best.token_ids), "", "")
    if parted is not None:
        lost = greedy.logprobs[parted] - best.logprobs[parted]
        figures.counted("parted", "they part at token", parted + 1, "", "of those that were written")
        figures.read("lost", "greedy was ahead there by", lost, "nat", "log p of its token - that of the beam's")
    why = (
        ""
        if gain >= GAIN
        else f"The beam gains {gain:.2f} nats here. Find an opening where the likeliest word misleads."
    )
    at = "" if parted is None else f" They part at written token {parted + 1}, where greedy took the likelier one."
    return figures.verdict("beams", why, f"{gain:.2f} nats more than greedy.{at}")


@challenge(
    "training",
    "One-token steer",
    f"The prompt is “{START}”. Change exactly one token, so that the model goes on with “{TARGET.strip()}”.",
    lambda _: f"“{TARGET.strip()}” within {STEERED} greedy tokens; the higher its log p, the better",
    text("prompt", "prompt", START, 200),
)
def steer(work: CheckWork, answer: ChallengeAnswer) -> Checked:
    figures = Figures()
    ours, ids = work.llm.tokenizer.encode(START), work.ids(answer.text("prompt"))
    changed = [place for place, (one, other) in enumerate(zip(ours, ids, strict=False)) if one != other]
    figures.counted("tokens", "tokens of yours", len(ids), "tokens", f"ours has {len(ours)}")
    if len(ids) != len(ours) or len(changed) != 1:
        apart = (
            f"{len(changed)} tokens differ" if len(ids) == len(ours) else f"it has {len(ids)} tokens, ours {len(ours)}"
        )
        return figures.verdict(
            "steer", f"Change exactly one token of “{START}”: {apart}. A rare word may be several.", ""
        )
    params = SamplingParams(temperature=0.0, max_tokens=STEERED, ignore_eos=True)
    with work.engine(len(ids) + STEERED, texts=2) as llm:
        written = work.text(llm, ids, params)
        before, after = (float(llm.score(one, [TARGET])[0].sum()) for one in (ours, ids))
    figures.given("token", "your token", quoted(work.llm, [ids[changed[0]]]), "", f"instead of token {changed[0] + 1}")
    figures.given("text", "it goes on", quoted(work.llm, written.token_ids), "", "greedy")
    figures.read("before", f"log p of “{TARGET.strip()}” before", before, "nat", "teacher-forced, after our prompt")
    figures.read("after", f"log p of “{TARGET.strip()}” now", after, "nat", "teacher-forced, after yours; 0 is certain")
    hit = TARGET.strip() in written.text.lower()
    why = (
        ""
        if hit
        else f"It goes on with “{quoted(work.llm, written.token_ids)}”. What has “{TARGET.strip()}” as its opposite?"
    )
    done = f"One token turned its chance from {math.exp(before):.2%} to {math.exp(after):.1%}. The higher, the better."
    return figures.verdict("steer", why, done)
