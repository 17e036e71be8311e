"""For each of the explorer's challenges, the figure that shows that this model can meet it.

Each function computes one figure with the recipe's own arithmetic (`probe.py`) and returns it as text and numbers;
`all_figures` collects them by the challenges' numbers. For a challenge about the engine (clock, pages), the figure is
the model's part of it: times here are of plain torch on this machine, and are labelled so.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from recipes.stories.model import Model
from recipes.stories.probe import FULL, PAGE, Cache, View, divergence, greedy, log_probability, run
from recipes.stories.sample import PROMPTS, prompt_ids

Figure = dict[str, object]
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play in the park with her dog. One day, Lily "
    "and her dog went to the park. They saw a big tree with red apples. Lily wanted to eat an apple, but the tree was "
    "too tall. She asked her mom for help. Her mom smiled and"
)
OPENINGS = (
    *PROMPTS, "Tom and his sister went to the", "The little bird was very", "One day, a boy named Ben",
    "The king said to", "Lily was sad because she", "In the forest there lived", "The dog ran after the",
    "Her mother gave her",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """The model, its tokenizer, and the two sizes that the formulas need."""

    model: Model
    tokenizer: Tokenizer

    def ids(self, text: str, chat: bool = False) -> list[int]:
        return prompt_ids(self.tokenizer, text, chat)

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))

    @property
    def block_weights(self) -> int:
        return sum(w.numel() for name, w in self.model.named_parameters() if w.ndim == 2 and "embed" not in name)

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V per token in bf16."""
        config = self.model.config
        return config.layers * 2 * config.kv_heads * config.head_size * 2

    def step_flops(self, length: int, tokens: int = 1) -> int:
        """FLOP: 2 (P_b + P_lm) + A(t) for a cached step; a pass over several tokens uses the output matrix once."""
        config = self.model.config
        attention = 4 * config.heads * config.head_size * config.layers
        attended = tokens * length - tokens * (tokens - 1) // 2
        return 2 * self.block_weights * tokens + 2 * config.vocab * config.width + attention * attended


def bound_the_answer(subject: Subject) -> Figure:
    question = "Is Python an interpreted language?"
    figures: Figure = {}
    seconds = []
    for name, text in (("long", question), ("short", f"{question} Answer in one word.")):
        began = time.perf_counter()
        written = greedy(subject.model, subject.ids(text, chat=True), 300)
        seconds.append(time.perf_counter() - began)
        figures[name] = {"text": subject.text(written), "tokens": len(written) + 1, "finished": len(written) < 300}
    return {**figures, "ratio of times, cached, plain torch": seconds[0] / seconds[1]}


def agree(subject: Subject) -> Figure:
    """A correct cached run against one pass, and the effect of each planted fault on 64 rows."""
    model = subject.model
    prompt = subject.ids(STORY)
    ids = prompt + greedy(model, prompt, 64, stops=())
    start = len(prompt)
    whole = run(model, ids)[0][start - 1 : -1]

    def against(logits: torch.Tensor) -> dict[str, float]:
        equal = (logits.argmax(-1) == whole.argmax(-1)).sum().item()
        return {"argmax equal of 64": int(equal), "max |d logit|": (logits - whole).abs().max().item()}

    def stepped(cache: Cache, view: View = FULL) -> torch.Tensor:
        first = run(model, ids[:start], cache, view)[0][-1:]
        return torch.cat([first, *(run(model, [token], cache, view)[0] for token in ids[start:-1])])

    def stale() -> torch.Tensor:
        other = Cache()
        run(model, subject.ids(" ".join(OPENINGS))[:PAGE], other)
        cache = Cache()
        run(model, ids[:start], cache)
        cache.keys = [torch.cat((wrong, k[:, PAGE:]), dim=1) for wrong, k in zip(other.keys, cache.keys, strict=True)]
        cache.values = [
            torch.cat((wrong, v[:, PAGE:]), dim=1) for wrong, v in zip(other.values, cache.values, strict=True)
        ]
        return torch.cat([whole[:1], *(run(model, [token], cache)[0] for token in ids[start:-1])])

    ended = subject.ids("Say yes.", chat=True) + subject.ids("Yes.")[1:] + [4]
    return {
        "healthy": against(stepped(Cache())),
        "position off by one": against(stepped(Cache(), View(shift_from=start, shift=1))),
        "rope applied twice": against(stepped(Cache(), View(rope_twice=True))),
        "missing mask": against(stepped(Cache(), View(unmasked=True))),
        "stale page": against(stale()),
        "eos at prefill": {"first token after an ended answer": int(run(model, ended)[0][-1].argmax()), "eos id": 1},
    }


def cache_equals_weights(subject: Subject) -> Figure:
    size = 2 * sum(weight.numel() for weight in subject.model.parameters())
    context = size / subject.cache_bytes
    return {
        "weight bytes": size,
        "cache bytes per token": subject.cache_bytes,
        "tokens": context,
        "at B = 8": context / 8,
    }


def llama_cache_in_8_gb(_: Subject) -> Figure:
    """The tokens of Llama-3-8B's cache in 8 GB (10^9 bytes), from its shape: the same for every model of the page."""
    tokens, per_head = 131_072, 32 * 2 * 128
    full = {"MHA fp16": 32 * 2.0, "GQA fp16": 8 * 2.0, "GQA int8": 8 * 1.0625, "GQA int4/g32": 8 * 0.5625}
    figures = {name: tokens * per_head * size / 1e9 for name, size in full.items()}
    return {**figures, "GQA fp16, 8 of 32 full, W=4096": (8 * tokens + 24 * 4096) * 2 * 128 * 8 * 2 / 1e9}


def predict(subject: Subject) -> Figure:
    length = 101
    return {
        "at t": length, "FLOP cached": subject.step_flops(length), "FLOP uncached": subject.step_flops(length, length),
        "cache bytes": length * subject.cache_bytes, "forward tokens cached, uncached": [1, length],
    }  # fmt: skip


def win(subject: Subject) -> Figure:
    """The race: in both lanes the prompt's pass gives the first token, and one step each the other 499."""
    prompt, written = 500, 500
    first = subject.step_flops(prompt, prompt)
    cached = first + sum(subject.step_flops(t) for t in range(prompt + 1, prompt + written))
    naive = first + sum(subject.step_flops(t, t) for t in range(prompt + 1, prompt + written))
    return {"N, T": [prompt, written], "FLOP ratio": naive / cached}


def timed(subject: Subject, prompt: int, steps: int) -> tuple[float, float]:
    """Seconds to the first token, and to the last of `steps` steps."""
    ids = (subject.ids(STORY) * 20)[:prompt]
    began, cache = time.perf_counter(), Cache()
    logits, _ = run(subject.model, ids, cache)
    first = time.perf_counter() - began
    for _ in range(steps - 1):
        logits, _ = run(subject.model, [int(logits[-1].argmax())], cache)
    return first, time.perf_counter() - began


def bound_by(subject: Subject) -> Figure:
    timed(subject, 100, 2)
    shares = {}
    for name, prompt, steps in (("prefill-bound: 1000 in, 4 out", 1000, 4), ("decode-bound: 8 in, 200 out", 8, 200)):
        first, total = timed(subject, prompt, steps)
        shares[name] = first / total
    return {"share of TTFT in the whole, plain torch": shares}


def steer(subject: Subject) -> Figure:
    """All one-token changes of a prompt, and those that make the greedy continuation begin with the target."""
    opening, wanted = "The opposite of big is", " night"
    ids, target = subject.ids(opening), subject.ids(wanted)[1:]
    best: tuple[float, str] = (float("-inf"), "")
    hits = 0
    for place in range(1, len(ids)):
        changed = torch.tensor(ids).repeat(subject.model.config.vocab, 1)
        changed[:, place] = torch.arange(subject.model.config.vocab)
        with torch.inference_mode():
            ends = torch.cat([subject.model(part)[:, -1].log_softmax(-1) for part in torch.split(changed, 512)])
        for token in (ends.argmax(-1) == target[0]).nonzero().flatten().tolist():
            prompt = changed[token].tolist()
            if greedy(subject.model, prompt, len(target)) == target:
                hits += 1
                best = max(best, (log_probability(subject.model, prompt, target), subject.text(prompt)))
    return {
        "from": opening,
        "target": wanted,
        "changes that do": hits,
        "best": best[1],
        "nats": best[0],
    }


def entropy_bits(logits: torch.Tensor) -> float:
    chances = logits.softmax(-1)
    return float(-(chances * chances.clamp_min(1e-30).log2()).sum())


def sampler(subject: Subject) -> Figure:
    """Entropy at one step over temperatures, the one that gives 2 bits, and a draw there of rank 5 or more."""
    logits = run(subject.model, subject.ids(STORY))[0][-1]
    reach = {str(t): entropy_bits(logits / t) for t in (0.2, 0.5, 1.0, 1.5, 2.0)}
    low, high = 0.05, 5.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if entropy_bits(logits / middle) < 2.0 else (low, middle)
    chances, ranks = (logits / low).softmax(-1), logits.argsort(descending=True).argsort()
    for seed in range(10_000):
        drawn = int(torch.multinomial(chances, 1, generator=torch.Generator().manual_seed(seed)))
        if ranks[drawn] >= 5:
            break
    return {"bits at T": reach, "T for 2 bits": low, "bits": entropy_bits(logits / low), "seed of rank >= 5": seed,
            "its token": subject.text([drawn]), "its rank": int(ranks[drawn])}  # fmt: skip


def window(subject: Subject) -> Figure:
    """Mean KL over 32 tokens that the model generated after a generated prompt, per window and sinks."""
    prompt = subject.ids(STORY)
    ids = prompt + greedy(subject.model, prompt, 32, stops=())
    kl = {
        sinks: {
            wide: divergence(subject.model, ids, len(prompt), View(window=wide, sinks=sinks))
            for wide in range(4, len(ids))
        }
        for sinks in (0, 1, 2, 4)
    }
    smallest = {sinks: min(wide for wide, value in row.items() if value <= 0.05) for sinks, row in kl.items()}
    best = min(smallest.values())
    return {
        "tokens": len(ids),
        "mean KL": {f"s={s}": {f"W={w}": row[w] for w in (4, 8, 16, 32, 48, 64)} for s, row in kl.items()},
        "smallest W with KL <= 0.05": {f"s={sinks}": wide for sinks, wide in smallest.items()},
        f"at W={best}": {f"s={sinks}": row[best] for sinks, row in kl.items()},
    }


def fewest_bits(subject: Subject) -> Figure:
    """The number of openings with the same 64 greedy tokens when the cache has fewer bits."""
    model = subject.model
    same = dict.fromkeys((8, 6, 5, 4, 3, 2), 0)
    which: dict[str, int] = {}
    for opening in OPENINGS:
        ids = subject.ids(opening)
        native = greedy(model, ids, 64, stops=())
        for bits in same:
            if greedy(model, ids, 64, View(bits=bits), stops=()) == native:
                same[bits] += 1
                which[opening] = bits
    return {
        "of": len(OPENINGS),
        "identical at bits": {str(b): n for b, n in same.items()},
        "fewest bits that held": which,
    }


def share_prefix(subject: Subject) -> Figure:
    ids = (subject.ids(STORY) * 20)[:896]
    tails = [subject.ids(question)[1:] for question in OPENINGS[4:8]]
    lengths = [len(ids) + len(tail) for tail in tails]
    apart = sum(-(-length // PAGE) for length in lengths)
    together = len(ids) // PAGE + sum(-(-(length - len(ids)) // PAGE) for length in lengths)
    cache, began = Cache(), time.perf_counter()
    run(subject.model, ids + tails[0], cache)
    first = time.perf_counter() - began
    cache.keys = [keys[:, : len(ids)] for keys in cache.keys]
    cache.values = [values[:, : len(ids)] for values in cache.values]
    began = time.perf_counter()
    shared = run(subject.model, tails[1], cache)[0]
    second = time.perf_counter() - began
    fresh = run(subject.model, ids + tails[1])[0][-len(tails[1]) :]
    return {"prefix": len(ids), "pages apart": apart, "pages shared": together,
            "TTFT ratio, plain torch": first / second,
            "max |d logit|": (fresh - shared).abs().max().item()}  # fmt: skip


def beam(model: Model, ids: list[int], width: int, steps: int) -> list[int]:
    """The most probable of `width` texts after `steps` tokens, without end tokens. Width 1 is greedy."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(steps):
        with torch.inference_mode():
            logits = model(torch.tensor([ids + written for _, written in beams]))[:, -1]
            logits[:, [0, 1, 4]] = float("-inf")
        totals = torch.tensor([total for total, _ in beams])[:, None] + logits.log_softmax(-1)
        best = totals.flatten().topk(width)
        beams = [
            (value, [*beams[place // logits.shape[1]][1], place % logits.shape[1]])
            for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
    return beams[0][1]


def beat_greedy(subject: Subject) -> Figure:
    """The opening with the largest gain of four beams of 32 tokens over greedy, and how many gain a nat."""
    gains: list[tuple[float, str, int]] = []
    for opening in OPENINGS:
        ids = subject.ids(opening)
        alone, wide = beam(subject.model, ids, 1, 32), beam(subject.model, ids, 4, 32)
        gain = log_probability(subject.model, ids, wide) - log_probability(subject.model, ids, alone)
        parted = next((i for i, (a, b) in enumerate(zip(alone, wide, strict=True)) if a != b), -1)
        gains.append((gain, opening, parted))
    best = max(gains)
    return {"openings": len(gains), "gain >= 1 nat": sum(gain >= 1 for gain, _, _ in gains), "best gain": best[0],
            "on": best[1], "paths part at token": best[2]}  # fmt: skip


FIGURES: dict[int, Callable[[Subject], Figure]] = {
    1: bound_the_answer, 2: agree, 3: cache_equals_weights, 4: llama_cache_in_8_gb, 5: predict, 6: win, 7: bound_by,
    8: steer, 9: sampler, 11: window, 12: fewest_bits, 13: share_prefix, 14: beat_greedy,
}  # fmt: skip


def all_figures(model: Model, tokenizer: Tokenizer) -> dict[int, Figure]:
    """The figures by challenge. Challenge 10, the hunt for heads, has its own table in `evaluate.heads`."""
    subject = Subject(model, tokenizer)
    return {number: figure(subject) for number, figure in FIGURES.items()}
