"""Challenges of the cards on the loop, and on prefill and decode: bound, phases, share."""

from collections.abc import Callable

from tokenwright.engine import FinishReason, SamplingParams
from tokenwright.errors import RequestError
from tokenwright.explorer.learn import challenge
from tokenwright.explorer.learn.challenge import QUESTION
from tokenwright.explorer.learn.work import PAGE, CheckWork
from tokenwright.explorer.panels.learn import Checked
from tokenwright.llm.llm import LLM
from tokenwright.llm.outputs import Completion

ROUNDS = 3  # the fastest one is shown
FREE = 256  # tokens of the unbounded answer
TENTH, SHORT = 10, 16  # a bounded answer may have a tenth of the free one's tokens, or so many if that is more
THIRD = 3  # of the first prompt's tokens, which the second may compute
DOCUMENT, WRITTEN = 600, 8  # tokens


def _fastest(work: CheckWork, llm: LLM, ids: list[int], tokens: int, name: str) -> Completion:
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    rounds = [work.text(llm, ids, params, salt=f"{name} {n}") for n in range(ROUNDS)]
    return min(rounds, key=lambda one: one.usage.total_s)


def _times(figures: challenge.Figures, name: str, label: str, written: Completion) -> None:
    usage = written.usage
    clock = f"from the request to the last token, the fastest of {ROUNDS} rounds"
    rest = (usage.total_s - (usage.ttft_s or 0)) * 1e6
    figures.counted(f"{name}_tokens", f"tokens, {label}", usage.completion_tokens, "tokens", "tokens written")
    figures.measured(f"{name}_ttft", f"first token, {label}", (usage.ttft_s or 0) * 1e6, "us", "time to first token")
    figures.measured(f"{name}_rest", f"the other tokens, {label}", rest, "us", "(n - 1) times TPOT")
    figures.measured(f"{name}_total", f"whole, {label}", usage.total_s * 1e6, "us", clock)


@challenge.challenge(
    "loop",
    "Bound the answer",
    f"The question is: “{QUESTION}” Add a few words that fix the form of the answer, and a limit, so that the "
    "right answer comes whole in far fewer tokens. A cut answer does not count.",
    lambda _: f"at most a tenth of the tokens of the model's own answer, or {SHORT} if more; it ends by itself",
    challenge.text("format", "added to the question", "", 200),
    challenge.whole("max_tokens", "max tokens", 128, 1, FREE),
)
def bound(work: CheckWork, answer: challenge.ChallengeAnswer) -> Checked:
    figures, form = challenge.Figures(), answer.text("format")
    with work.engine(work.context) as llm:
        free = _fastest(work, llm, challenge.asked(llm, QUESTION), FREE, "free")
        short = _fastest(work, llm, challenge.asked(llm, f"{QUESTION} {form}"), answer.whole("max_tokens"), "bound")
    took, most = short.usage.completion_tokens, max(SHORT, free.usage.completion_tokens // TENTH)
    ratio = free.usage.total_s / short.usage.total_s
    _times(figures, "free", "left alone", free)
    _times(figures, "bound", "yours", short)
    figures.given("answer", "your answer", short.text.strip()[:80], "", "what the model wrote")
    figures.given("finish", "it ended by", str(short.finish_reason), "", "eos, stop, or length where it was cut")
    figures.derived("most", "at most", most, "tokens", f"a tenth of the free answer's, or {SHORT}")
    figures.measured("ratio", "times faster", ratio, "times", "whole time left alone / whole time of yours")
    why = ""
    if short.finish_reason not in (FinishReason.EOS, FinishReason.STOP):
        why = "The answer was cut by max tokens: that truncates, it does not shorten. Ask for a shorter form."
    elif "yes" not in short.text.lower():
        why = "The answer is not right any more (yes). Ask for a form that still lets the model say it."
    elif took > most:
        why = (
            f"It ended by itself and is right, but has {took} tokens; {most} are allowed. Ask for a still shorter form."
        )
    return figures.verdict(
        "bound",
        why,
        f"Right, complete, {took} tokens instead of {free.usage.completion_tokens}, and {ratio:.1f} times faster here.",
    )


@challenge.challenge(
    "phases",
    "Prefill-bound, decode-bound",
    "Choose how much is read and how much is written, for one run that spends most of its time before the first "
    "token, and one that spends nearly none.",
    lambda llm: f"TTFT over 50 % of the 1st run, under 5 % of the 2nd; at most {min(1024, llm.context)} tokens",
    challenge.whole("prefill_tokens", "1st run: prompt tokens", 100, 1, 1023),
    challenge.whole("prefill_new", "1st run: new tokens", 100, 1, 512),
    challenge.whole("decode_tokens", "2nd run: prompt tokens", 100, 1, 1023),
    challenge.whole("decode_new", "2nd run: new tokens", 100, 1, 512),
)
def phases(work: CheckWork, answer: challenge.ChallengeAnswer) -> Checked:
    figures, shares = challenge.Figures(), []
    ids = work.ids(challenge.STORY)
    for name in ("prefill", "decode"):
        tokens, new = answer.whole(f"{name}_tokens"), answer.whole(f"{name}_new")
        if tokens + new > work.context:
            raise RequestError(f"prompt and new tokens of a run are together at most {work.context} here")
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        with work.engine(tokens + new) as llm:
            texts = [work.text(llm, challenge.repeated(ids, tokens), params, salt=str(n)) for n in range(ROUNDS)]
        written = min(texts, key=lambda one: one.usage.total_s)
        shares.append((written.usage.ttft_s or 0) / written.usage.total_s)
        _times(figures, name, f"{name}-bound", written)
        figures.measured(
            f"{name}_share", f"TTFT, {name}-bound", 100 * shares[-1], "%", "time to first token / whole time"
        )
    why = ""
    if shares[0] <= 0.5:
        why = (
            f"In the first run prefill takes {shares[0]:.0%}, not more than half. Give it more to read, less to write."
        )
    elif shares[1] >= 0.05:
        why = f"In the second run prefill takes {shares[1]:.1%}, not under 5 %. Give it less to read, more to write."
    return figures.verdict("phases", why, "One run spends its time on reading, the other on writing.")


def _share_targets(llm: LLM) -> tuple[int, int]:
    document = min(DOCUMENT, max(4 * PAGE, min(1024, llm.context) - 8 * PAGE))
    rests = [len(llm.tokenizer.encode(question)) + WRITTEN for question in challenge.QUESTIONS]
    return document, -(-document // PAGE) + sum(-(-rest // PAGE) + 1 for rest in rests)


def _share_target(llm: LLM) -> str:
    document, most = _share_targets(llm)
    return (
        f"a document of {document} tokens: at most {most} pages of {PAGE} tokens, and the 2nd prompt computes at most "
        "a third of what the 1st does"
    )


@challenge.challenge(
    "smaller",
    "Share the prefix",
    "Four questions about one document. Put the prompts together so that the later ones find the document's K and "
    "V in the cache.",
    _share_target,
    challenge.choice("order", "order", "question first", "document first"),
    challenge.choice("salt", "salt", "one each", "one for all"),
)
def share(work: CheckWork, answer: challenge.ChallengeAnswer) -> Checked:
    figures, params = challenge.Figures(), SamplingParams(temperature=0.0, max_tokens=WRITTEN, ignore_eos=True)
    document, target = _share_targets(work.llm)
    ids, first = challenge.repeated(work.ids(challenge.STORY), document), answer.text("order") == "document first"
    questions = [work.llm.tokenizer.encode(question, add_special=False) for question in challenge.QUESTIONS]
    bos = ids[:1] if not first else []
    prompts = [ids + question if first else bos + question + ids for question in questions]
    salt: Callable[[int], str] = (lambda _: "all") if answer.text("salt") == "one for all" else str
    with work.engine(max(map(len, prompts)) + WRITTEN, texts=2 * len(prompts)) as llm:

        def asked_all(n: int) -> list[Completion]:
            return [work.text(llm, prompt, params, salt=f"{n} {salt(i)}") for i, prompt in enumerate(prompts)]

        rounds = [asked_all(0)]
        computed = [one.usage.prompt_tokens - one.usage.reused_tokens for one in rounds[0]]
        lengths = [one.usage.prompt_tokens + WRITTEN - 1 for one in rounds[0]]
        apart = sum(-(-length // PAGE) for length in lengths)
        pages = apart - sum(one.usage.reused_tokens // PAGE for one in rounds[0])
        rounds += [asked_all(n) for n in range(1, ROUNDS) if pages <= target]
        alone = [work.text(llm, prompt, params, salt=f"alone {i}") for i, prompt in enumerate(prompts)]
    ttft = [min(texts[i].usage.ttft_s or 0 for texts in rounds) for i in (0, 1)]
    same = all(one.token_ids == other.token_ids for one, other in zip(rounds[0], alone, strict=True))
    figures.counted("apart", "pages, nothing shared", apart, "", f"pages of {PAGE} tokens of the four texts")
    figures.counted("pages", "physical pages", pages, "", "those, less the pages that a later text reused")
    figures.derived("target", "at most", target, "", "the document's pages once, and each question's and answer's")
    figures.counted("computed_1", "computed for the 1st prompt", computed[0], "tokens", "not found in the cache")
    figures.counted("computed_2", "computed for the 2nd prompt", computed[1], "tokens", "not found in the cache")
    figures.measured("ttft_1", "first token, 1st text", ttft[0] * 1e6, "us", "the fastest of three")
    figures.measured("ttft_2", "first token, 2nd text", ttft[1] * 1e6, "us", "the fastest of three")
    figures.counted("same", "texts unchanged", "yes" if same else "no", "", "token by token, against each text alone")
    why = ""
    if pages > target and not first:
        why = (
            "Nothing is shared: the texts differ from their first tokens on. A page is shared only with all before it."
        )
    elif pages > target:
        why = "Nothing is shared: a salt of its own keeps each text's pages to itself. Use one for all."
    elif computed[0] < THIRD * computed[1]:
        why = f"The second prompt still computes {computed[1]} of its tokens. Put more of what is alike first."
    elif not same:
        why = "A shared prefix changed a text. That must never happen: report it."
    return figures.verdict(
        "share",
        why,
        f"{pages} pages instead of {apart}. The second prompt computed {computed[1]} tokens, the first {computed[0]}: "
        f"its first token came {ttft[0] / ttft[1]:.1f} times sooner here.",
    )
