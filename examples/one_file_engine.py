"""An inference engine for language models in one file: NumPy and the standard library.

    python examples/one_file_engine.py "Once upon a time" "One day, a cat" --temperature 0.7 --seed 4

It is a loop of four lines, `Engine.step`:

    chunks = scheduler.schedule()             # which tokens of which sequences to compute now
    logits = model(chunks, cache)             # compute them; their K and V land in the cache
    tokens = pick(chunks, logits)             # choose the next token of every sequence that has caught up
    ended = scheduler.commit(chunks, tokens)  # append the tokens, cache full pages, release ended sequences

The parts, in the order of the file:

    Sequence   a text: its tokens, how many of them are computed, and its page table
    Pool       the pages: which are free, cached or in use, and the hashes by which cached pages are found
    Scheduler  continuous batching, chunked prefill, preemption
    Llama      the model, which writes and reads K and V through page tables
    sample     from logits to a token, by a random number that depends on seed and position only

K and V of a token depend on the tokens up to it and on no later one, so they are computed once and kept, in pages. A
page table lists a sequence's pages in order; sequences that begin with the same tokens share the pages of that prefix:

    page tables, with pages of 4 tokens                   the pool
    A  Once upon a time|, there was a|little girl         page 0  free
           page 4           page 2       page 5           page 1  cached, of a sequence that has ended
                                                          page 2  in use by A
    B  Once upon a time| in a land                        page 3  in use by B
           page 4           page 3                        page 4  in use by both, found by hash("Once upon a time")
                                                          page 5  in use by A, not full: without a hash
"""

import argparse
import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from struct import pack, unpack_from
from typing import Any, NamedTuple

import numpy as np


class Sampling(NamedTuple):
    """How to choose tokens, and how many. Temperature 0: the most probable one; top_p 1: none is left out."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 128


@dataclass(eq=False)
class Sequence:
    """A text. Prompt and completion are one list of tokens; those that are not computed yet are pending."""

    tokens: list[int]
    sampling: Sampling
    limit: int  # number of tokens at which it ends
    computed: int = 0  # number of its first tokens whose K and V are in the cache
    pages: list[int] = field(default_factory=list)  # the page table: entry n is for the positions from n * page_size on
    hashes: list[bytes] = field(default_factory=list)  # of its full pages, computed when they are needed

    def page_hashes(self, count: int, page_size: int) -> list[bytes]:
        """The hashes of the first `count` pages. Each covers the one before, as K and V depend on the whole prefix."""
        for start in range(len(self.hashes) * page_size, count * page_size, page_size):
            before = self.hashes[-1] if self.hashes else b""
            tokens = pack(f"<{page_size}I", *self.tokens[start : start + page_size])
            self.hashes.append(sha256(before + tokens).digest())
        return self.hashes[:count]

    def slots(self, stop: int, page_size: int) -> np.ndarray:
        """The places in the cache of its first `stop` tokens: page p has those from p * page_size on."""
        return (np.array(self.pages)[:, None] * page_size + np.arange(page_size)).ravel()[:stop]


class Chunk(NamedTuple):
    """The tokens [start, stop) of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    stop: int


class Pool:
    """The page numbers, and the state of each page. It knows no tensors and no sequences.

    in use   in `refcounts`: the number of page tables that have the page
    cached   in `available`, with a hash: no table has it, but a sequence with the same prefix will find it
    free     in `available`, without a hash
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size
        self.available = OrderedDict.fromkeys(range(pages))  # in the order of allocation: free, then cached by age
        self.refcounts: Counter[int] = Counter()
        self.hash_of: dict[int, bytes] = {}
        self.page_of: dict[bytes, int] = {}  # the inverse
        self.evictions = 0

    def allocate(self) -> int:
        """Take a page to write to. If none is free, evict the cached page that was released first."""
        page, _ = self.available.popitem(last=False)
        if page in self.hash_of:
            del self.page_of[self.hash_of.pop(page)]
            self.evictions += 1
        self.refcounts[page] = 1
        return page

    def attach(self, hashes: Iterable[bytes]) -> list[int]:
        """A page table of the longest prefix whose pages have these hashes, be they cached or in use."""
        pages = [self.page_of[page_hash] for page_hash in takewhile(self.page_of.__contains__, hashes)]
        for page in pages:
            self.available.pop(page, None)
            self.refcounts[page] += 1
        return pages

    def cache(self, page: int, page_hash: bytes) -> None:
        """Let other sequences find a page by its hash. It is full, so it will not be written to again."""
        if page_hash not in self.page_of:  # another sequence may have computed the same tokens
            self.hash_of[page], self.page_of[page_hash] = page_hash, page

    def release(self, pages: list[int]) -> None:
        """Empty a page table, the last page first, so that the end of a text is evicted before its beginning."""
        while pages:
            page = pages.pop()
            self.refcounts[page] -= 1
            if not self.refcounts[page]:
                del self.refcounts[page]
                self.available[page] = None
                self.available.move_to_end(page, last=page in self.hash_of)

    def check(self, tables: Iterable[list[int]]) -> None:
        """Prove that free + cached + in use = all pages, and that a page has one hash and a hash one page."""
        used = Counter(page for table in tables for page in table)
        assert used == self.refcounts, "a refcount is not the number of tables with that page"
        assert sorted([*self.available, *used]) == list(range(self.pages)), "a page is lost, or in two places"
        assert {page: key for key, page in self.page_of.items()} == self.hash_of, "a page or a hash occurs twice"


class Scheduler:
    """Chooses the tokens of each step. There is no prefill phase and no decode phase: every sequence computes its
    pending tokens, a prompt in chunks and then one token at a time, and all share one token budget.
    When pages run out, the youngest sequence is preempted: it gives up its pages and waits. So the oldest always ends.
    """

    def __init__(self, pool: Pool, token_budget: int, end_ids: Iterable[int]) -> None:
        self.pool, self.token_budget, self.end_ids = pool, token_budget, frozenset(end_ids)
        self.running: list[Sequence] = []  # the oldest first
        self.waiting: deque[Sequence] = deque()  # younger than the running ones, and without pages
        self.reused = self.preemptions = 0

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step: one for each running sequence, then for as many more as can be admitted."""
        chunks, budget = list[Chunk](), self.token_budget
        while budget and (sequence := self._at(len(chunks))):
            stop = min(len(sequence.tokens), sequence.computed + budget)
            if not self._reserve(sequence, stop):
                break
            chunks.append(Chunk(sequence, sequence.computed, stop))
            budget -= stop - sequence.computed
        return chunks

    def _at(self, place: int) -> Sequence | None:
        """The running sequence at a place. Behind the last one, the first waiting sequence is admitted if it fits."""
        if place == len(self.running) and self.waiting:
            self._admit(self.waiting[0])
        return self.running[place] if place < len(self.running) else None

    def _admit(self, sequence: Sequence) -> None:
        """Let a sequence run if there are pages for its tokens, beyond the pages of its cached prefix."""
        size = self.pool.page_size
        full = (len(sequence.tokens) - 1) // size  # the last token is always computed, for its logits
        sequence.pages = self.pool.attach(sequence.page_hashes(full, size))
        if math.ceil(len(sequence.tokens) / size) - len(sequence.pages) > len(self.pool.available):
            self.pool.release(sequence.pages)
        else:
            sequence.computed = len(sequence.pages) * size
            self.reused += sequence.computed
            self.running.append(self.waiting.popleft())

    def _reserve(self, sequence: Sequence, stop: int) -> bool:
        """Allocate pages up to `stop`, and preempt younger sequences for them. False: it was the youngest itself."""
        while len(sequence.pages) * self.pool.page_size < stop:
            if self.pool.available:
                sequence.pages.append(self.pool.allocate())
            elif self._preempt() is sequence:
                return False
        return True

    def _preempt(self) -> Sequence:
        """Take the pages of the youngest sequence. It keeps its tokens; K and V are found again or recomputed."""
        sequence = self.running.pop()
        self.pool.release(sequence.pages)
        sequence.computed = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1
        return sequence

    def commit(self, chunks: list[Chunk], tokens: list[int | None]) -> list[Sequence]:
        """Append the tokens, cache the pages that are full now, and release the sequences that end: the result."""
        ended, size = [], self.pool.page_size
        for (sequence, start, stop), token in zip(chunks, tokens, strict=True):
            hashes = sequence.page_hashes(stop // size, size)
            for n in range(start // size, stop // size):
                self.pool.cache(sequence.pages[n], hashes[n])
            sequence.computed = stop
            if token is not None:
                sequence.tokens.append(token)
            if token in self.end_ids or len(sequence.tokens) == sequence.limit:
                self.running.remove(sequence)
                self.pool.release(sequence.pages)
                ended.append(sequence)
        return ended

    def check(self) -> None:
        """Prove the invariants. Tests call it after every step."""
        self.pool.check(sequence.pages for sequence in (*self.running, *self.waiting))
        assert not any(sequence.pages or sequence.computed for sequence in self.waiting), "a waiting sequence has pages"
        for sequence in self.running:
            assert sequence.computed <= len(sequence.pages) * self.pool.page_size, "a computed token has no page"
            for page in sequence.pages[sequence.computed // self.pool.page_size :]:
                assert (self.pool.refcounts[page], page in self.pool.hash_of) == (1, False), "a page to write is shared"


class Batch:
    """The chunks of a step as arrays: T tokens, one chunk after another."""

    def __init__(self, chunks: list[Chunk], size: int) -> None:
        self.ids = np.array([token for s, start, stop in chunks for token in s.tokens[start:stop]])  # [T]
        self.positions = np.concatenate([np.arange(start, stop, dtype=np.float32) for _, start, stop in chunks])  # [T]
        self.ends = np.cumsum([stop - start for _, start, stop in chunks])  # the row behind each chunk's last token
        self.contexts = [sequence.slots(stop, size) for sequence, _, stop in chunks]  # to read
        self.slots = np.concatenate([at[c.start :] for at, c in zip(self.contexts, chunks, strict=True)])  # to write


class Llama:
    """The weights of a checkpoint, by name, and the forward pass: H query heads, G KV heads, D numbers a head."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for key, known in (("model_type", "llama"), ("hidden_act", "silu")):
            if config.get(key, known) != known:
                raise ValueError(f"the {key} of {folder} is {config[key]}; this file computes {known} only")
        self.layers, heads = [f"layers.{n}" for n in range(config["num_hidden_layers"])], config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads") or heads
        self.head_size = config.get("head_dim") or config["hidden_size"] // heads
        self.context, self.eps = config["max_position_embeddings"], config["rms_norm_eps"]
        self.end_ids: list[int] = ends if isinstance(ends := config["eos_token_id"], list) else [ends]
        self.frequencies = frequencies(config, self.head_size)
        self.weights = dict(tensor for file in folder.glob("*.safetensors") for tensor in read_tensors(file))
        self.weights.setdefault("lm_head", self.weights["embed_tokens"])  # "tied": one matrix for both

    def __call__(self, batch: Batch, cache: np.ndarray) -> np.ndarray:
        """The logits after the last token of each chunk: [chunks, V]."""
        angles = batch.positions[:, None] * self.frequencies  # [T, D / 2]
        x = self.weights["embed_tokens"][batch.ids]  # [T, width]
        for layer, kv in zip(self.layers, cache, strict=True):  # kv [2, slots, G, D]
            x = x + self.attention(f"{layer}.self_attn", self.norm(f"{layer}.input_layernorm", x), angles, batch, kv)
            x = x + self.mlp(f"{layer}.mlp", self.norm(f"{layer}.post_attention_layernorm", x))
        return self.linear("lm_head", self.norm("norm", x[batch.ends - 1]))

    def attention(self, name: str, x: np.ndarray, angles: np.ndarray, batch: Batch, kv: np.ndarray) -> np.ndarray:
        q, k, v = (self.linear(f"{name}.{part}_proj", x).reshape(len(x), -1, self.head_size) for part in "qkv")
        q, k = rotate(q, angles), rotate(k, angles)  # q [T, H, D], k and v [T, G, D]
        kv[:, batch.slots] = k, v  # before they are read: a token attends to itself as well
        out = [attend(rows, *kv[:, at]) for rows, at in zip(np.split(q, batch.ends[:-1]), batch.contexts, strict=True)]
        return self.linear(f"{name}.o_proj", np.concatenate(out))  # [T, width]

    def mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        gate, up = (self.linear(f"{name}.{part}_proj", x) for part in ("gate", "up"))
        return self.linear(f"{name}.down_proj", gate * (0.5 + 0.5 * np.tanh(gate / 2)) * up)  # silu(gate) up

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.weights[name].T + self.weights.get(f"{name}.bias", np.float32(0))

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(self.eps)) * self.weights[name]


def read_tensors(file: Path) -> Iterable[tuple[str, np.ndarray]]:
    """The weights of a safetensors file, by name, in float32: after a length comes a JSON header, and then the data."""
    start = 8 + unpack_from("<Q", data := file.read_bytes())[0]
    for name, header in json.loads(data[8:start]).items():
        if name != "__metadata__":
            (begin, end), kind = header["data_offsets"], {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[header["dtype"]]
            x = np.frombuffer(data[start + begin : start + end], kind).reshape(header["shape"])
            x = (x.astype("<u4") << 16).view("<f4") if kind == "<u2" else x.astype("<f4")  # bfloat16: its upper half
            yield name.removeprefix("model.").removesuffix(".weight"), x


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """softmax(q k / sqrt(D)) v, [n, H D]: q [n, H, D] of the last n tokens of a context, k and v [context, G, D]."""
    rows, (context, kv_heads, size) = len(q), k.shape
    q = q.reshape(rows, kv_heads, -1, size).transpose(1, 2, 0, 3)  # [G, H / G, n, D]
    scores = q @ k.transpose(1, 2, 0)[:, None] / np.float32(math.sqrt(size))  # [G, H / G, n, context]
    scores[..., ~np.tri(rows, context, context - rows, dtype=bool)] = -math.inf  # the last row sees everything
    return (softmax(scores) @ v.swapaxes(0, 1)[:, None]).transpose(2, 0, 1, 3).reshape(rows, -1)


def softmax(x: np.ndarray) -> np.ndarray:
    return (powers := np.exp(x - x.max(-1, keepdims=True))) / powers.sum(-1, keepdims=True)


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rotate each pair (i, i + D / 2) of x [T, heads, D] by its angle [T, D / 2] (RoPE, arXiv 2104.09864)."""
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]  # [T, 1, D / 2]
    left, right = np.split(x, 2, axis=-1)
    return np.concatenate((left * cos - right * sin, right * cos + left * sin), axis=-1)


def frequencies(config: dict[str, Any], head_size: int) -> np.ndarray:
    """The angle of each pair from one position to the next, in radians: [D / 2]."""
    rope = config | (config.get("rope_parameters") or config.get("rope_scaling") or {})
    angles = rope.get("rope_theta", 10000.0) ** np.float32(-np.arange(0, head_size, 2) / head_size)
    if (kind := rope.get("rope_type", rope.get("type", "default"))) == "default":
        return angles
    if kind != "llama3":
        raise ValueError(f"rope_scaling is {kind}; this file knows default and llama3 only")
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    rotations = rope["original_max_position_embeddings"] * angles / math.tau  # in the context of pretraining
    kept = np.clip((rotations - low) / (high - low), 0, 1)  # share of the original angle; the rest is divided by factor
    return angles * (kept + (1 - kept) / rope["factor"])


def sample(logits: np.ndarray, how: Sampling, number: float) -> int:
    """The inverse CDF, in the order of ids: the token of logits [V] on which a number from [0, 1) falls."""
    if how.temperature == 0:
        return int(logits.argmax())
    chances = softmax(logits.astype(np.float64) / how.temperature)
    if how.top_p < 1:  # keep the most probable ids until their sum reaches top_p
        highest = chances[ids := np.argsort(-chances, kind="stable")]
        chances[ids[highest.cumsum() - highest >= how.top_p]] = 0
    ends = chances.cumsum()
    return int(np.searchsorted(ends, number * ends[-1], side="right"))


def uniform(seed: int, position: int) -> float:
    """A number from [0, 1) that depends on nothing else: Philox ("Parallel random numbers: as easy as 1, 2, 3")."""
    return int(np.random.Philox(key=seed, counter=position).random_raw() >> 11) * 2.0**-53


def pick(chunks: list[Chunk], logits: np.ndarray) -> list[int | None]:
    """The next token of each chunk's sequence, from logits [chunks, V]; None where tokens of it are still pending."""
    return [
        sample(row, s.sampling, uniform(s.sampling.seed, stop)) if stop == len(s.tokens) else None
        for (s, _, stop), row in zip(chunks, logits, strict=True)
    ]


class Engine:
    """The loop, over a model and the memory for K and V."""

    def __init__(self, model: Llama, *, pages: int = 256, page_size: int = 16, token_budget: int = 256) -> None:
        self.model, self.pool = model, Pool(pages, page_size)
        self.scheduler = Scheduler(self.pool, token_budget, model.end_ids)
        self.cache = np.zeros((len(model.layers), 2, pages * page_size, model.kv_heads, model.head_size), "f4")  # K, V

    def add(self, prompt: list[int], sampling: Sampling) -> Sequence:
        """Queue a prompt, at any time between two steps. Raises ValueError if it can never run."""
        limit = min(len(prompt) + sampling.max_tokens, self.model.context)
        room = self.pool.pages * self.pool.page_size
        if not 0 < len(prompt) < limit <= room:
            raise ValueError(f"cannot continue {len(prompt)} tokens up to {limit}; the cache has room for {room}")
        self.scheduler.waiting.append(Sequence([*prompt], sampling, limit))
        return self.scheduler.waiting[-1]

    def step(self) -> list[Sequence]:
        """Compute one step; returns the sequences that ended."""
        chunks = self.scheduler.schedule()
        logits = self.model(Batch(chunks, self.pool.page_size), self.cache)
        tokens = pick(chunks, logits)
        return self.scheduler.commit(chunks, tokens)


def main() -> None:
    from tokenizers import Tokenizer  # the engine itself needs only ids

    parser = argparse.ArgumentParser(description="Continue all prompts at once, by a folder with a Llama model.")
    parser.add_argument("prompts", nargs="*", default=["Once upon a time"])
    parser.add_argument("--model", type=Path, default=Path(__file__).parents[1] / "src/tokenwright/stories")
    for name, default in {"temperature": 0.7, "top-p": 0.95, "seed": 0, "max-tokens": 200, "pages": 256}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{default} if not given")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    engine = Engine(Llama(args.model), pages=args.pages)
    scheduler, how = engine.scheduler, Sampling(args.temperature, args.top_p, args.seed, args.max_tokens)
    for prompt in args.prompts:
        engine.add(tokenizer.encode(prompt).ids, how)
    while scheduler.running or scheduler.waiting:
        for sequence in engine.step():
            print(tokenizer.decode(sequence.tokens), end="\n\n", flush=True)
    print(f"{scheduler.reused} tokens reused, {scheduler.preemptions} preemptions, {engine.pool.evictions} evictions")


if __name__ == "__main__":
    main()
