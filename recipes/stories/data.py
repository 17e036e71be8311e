"""From the corpus to rows of token ids: sources, held-out documents, the tokenizer, and the packing of rows.

A *document* begins with BOS and ends with EOS. A *row* is a training example of fixed length: it begins with BOS and
contains documents; a document cut by the row's end continues in another row, after a BOS. A *source* is a group of
documents with a share of its own; the shares change once, towards the end (`shares`).

This module owns the training data and their order. It knows no model.
"""

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from recipes.stories import facts

BOS, EOS, USER, ASSISTANT, END = "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIALS = (BOS, EOS, USER, ASSISTANT, END)  # ids 0 to 4, in this order
SEPARATOR = "<|endoftext|>"
HELD_OUT = 50  # one document in 50 is held out
STDLIB = Path(sysconfig.get_paths()["stdlib"])  # whose short functions are documents
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's split, single digits

# Shares of the tokens, per source, before and after MIX_CHANGE of the run.
MIX_CHANGE = 0.7
EARLY = {"tiny": 0.32, "picture": 0.10, "books": 0.36, "questions": 0.05, "facts": 0.06, "retold": 0.03,
         "python": 0.02, "functions": 0.01, "repeats": 0.05}  # fmt: skip
LATE = {"tiny": 0.44, "picture": 0.08, "books": 0.14, "questions": 0.03, "facts": 0.15, "retold": 0.06,
        "python": 0.02, "functions": 0.03, "repeats": 0.05}  # fmt: skip
OWN = ("facts", "functions")  # our own, to be memorised: none is held out
REPEATED = {"tiny": 4, "picture": 2, "facts": 2, "python": 2}  # the tokenizer's mix

Ids = NDArray[np.int64]


def shares(progress: float) -> dict[str, float]:
    return EARLY if progress < MIX_CHANGE else LATE


def is_held_out(document: str) -> bool:
    return int(hashlib.sha256(document.encode()).hexdigest()[:8], 16) % HELD_OUT == 0


def documents_of(*files: Path) -> list[str]:
    texts = (file.read_text(encoding="utf-8") for file in files)
    parts = (part.strip() for text in texts for part in text.split(f"{SEPARATOR}\n"))
    return [part.removesuffix(SEPARATOR).strip() for part in parts if part]


def python_functions(longest: int = 15) -> list[str]:
    """Short top-level functions of the running interpreter's standard library, one document each."""
    found: dict[str, None] = {}
    for file in sorted(STDLIB.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(file.parts):
            continue
        text = file.read_bytes().decode("utf-8", errors="ignore")
        if not text.isascii() or "\t" in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno < longest:
                found[f"{ast.get_source_segment(text, node)}\n"] = None
    return list(found)


@dataclass(frozen=True)
class Source:
    name: str
    train: list[str]
    held: list[str]


def split(name: str, documents: list[str]) -> Source:
    if name in OWN:
        return Source(name, documents, [])
    held = [is_held_out(document) for document in documents]
    return Source(
        name,
        [document for document, out in zip(documents, held, strict=True) if not out],
        [document for document, out in zip(documents, held, strict=True) if out],
    )


def split_questions(documents: list[str], books: Source) -> Source:
    """Split the passages, which repeat the books' tales: a passage is held out exactly when its tale is."""
    hidden = re.sub(r"\s+", " ", " ".join(books.held))
    held = [re.sub(r"\s+", " ", document)[:80] in hidden for document in documents]
    return Source(
        "questions",
        [document for document, out in zip(documents, held, strict=True) if not out],
        [document for document, out in zip(documents, held, strict=True) if out],
    )


def read_sources(corpus: Path) -> list[Source]:
    """Read all sources but `repeats`, which is generated. A missing folder gives an empty source."""
    tiny = split("tiny", documents_of(*sorted((corpus / "stories").glob("tinystories*.txt"))))
    others = sorted(set((corpus / "stories").glob("*.txt")) - set((corpus / "stories").glob("tinystories*.txt")))
    books = split("books", documents_of(*sorted((corpus / "books").glob("*.txt"))))
    short = [story for story in tiny.train if len(story) < 900]
    return [
        tiny,
        split("picture", documents_of(*others)),
        books,
        split_questions(documents_of(*sorted((corpus / "factual").glob("fairytaleqa*.txt"))), books),
        Source("facts", facts.documents(), []),
        Source("retold", list(facts.retold(short)), []),
        split("python", python_functions()),
        Source("functions", list(facts.code()), []),
    ]


def train_tokenizer(sources: list[Source], vocab: int) -> Tokenizer:
    """Train byte-level BPE on the training documents, with the special tokens first. Encoding prepends BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_text(sources), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    return tokenizer


def tokenizer_text(sources: list[Source]) -> Iterator[str]:
    pattern = re.compile("|".join(re.escape(token) for token in SPECIALS))
    for source in sources:
        for _ in range(REPEATED.get(source.name, 1)):
            for document in source.train:
                yield pattern.sub("", document)


def encode_sources(sources: list[Source], tokenizer: Tokenizer) -> dict[str, NDArray[np.generic]]:
    """Per source and split: the concatenated ids, the start of each document, and the bytes of text."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for source in sources:
        for part, documents in (("train", source.train), ("held", source.held)):
            encoded = [[0, *e.ids, 1] for e in tokenizer.encode_batch(documents, add_special_tokens=False)]
            arrays[f"{source.name}.{part}.ids"] = np.array([i for ids in encoded for i in ids], dtype=np.uint16)
            arrays[f"{source.name}.{part}.starts"] = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
            arrays[f"{source.name}.{part}.bytes"] = np.array([sum(len(d.encode()) for d in documents)])
    return arrays


@dataclass
class Corpus:
    """The encoded documents of one split: `ids[starts[i]:starts[i + 1]]` is document i."""

    ids: dict[str, NDArray[np.uint16]] = field(default_factory=dict)
    starts: dict[str, Ids] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def document(self, source: str, index: int) -> Ids:
        begin, end = self.starts[source][index : index + 2]
        return self.ids[source][begin:end].astype(np.int64)

    def count(self, source: str) -> int:
        return len(self.starts[source]) - 1


def load_corpus(file: Path, part: str) -> Corpus:
    arrays = load_file(file)
    corpus = Corpus()
    for name in (key.split(".")[0] for key in arrays if key.endswith(f".{part}.ids")):
        if len(arrays[f"{name}.{part}.starts"]) > 1:
            corpus.ids[name] = arrays[f"{name}.{part}.ids"]
            corpus.starts[name] = arrays[f"{name}.{part}.starts"]
            corpus.bytes[name] = int(arrays[f"{name}.{part}.bytes"][0])
    return corpus


def save_corpus(arrays: dict[str, NDArray[np.generic]], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, file)


@dataclass
class Cursor:
    """The read position in a source: documents in all (which gives the epoch), ids of the current one, ids in all."""

    read: int = 0
    offset: int = 0
    taken: int = 0


class Packer:
    """Fills rows from the sources so that each gets its share of the tokens.

    The next document comes from the source that is furthest behind its share. The order of each source is reshuffled
    every epoch. All random numbers follow from the seed and the cursors, so `state` and `restore` resume a run
    exactly.
    """

    def __init__(self, corpus: Corpus, vocab: int, seed: int) -> None:
        self.corpus, self.vocab, self.seed = corpus, vocab, seed
        self.cursors = {name: Cursor() for name in [*corpus.ids, "repeats"]}
        self.weights: dict[str, float] = {}
        self.orders: dict[tuple[str, int], Ids] = {}

    def aim(self, weights: dict[str, float]) -> None:
        """Set the shares. If they change, the token counts restart from 0."""
        known = {name: share for name, share in weights.items() if name in self.cursors}
        if known != self.weights and self.weights:
            for cursor in self.cursors.values():
                cursor.taken = 0
        self.weights = known

    def rows(self, count: int, length: int) -> tuple[Ids, Ids]:
        """Inputs and targets, both (count, length). The loss ignores targets of -100."""
        pairs = [self.row(length + 1) for _ in range(count)]
        inputs = np.stack([ids[:-1] for ids, _ in pairs])
        targets = np.stack([np.where(learn, ids, -100)[1:] for ids, learn in pairs])
        return inputs, targets

    def row(self, length: int) -> tuple[Ids, NDArray[np.bool_]]:
        ids, learn = np.zeros(length, dtype=np.int64), np.ones(length, dtype=np.bool_)
        filled = 0
        while filled < length:
            name = min(self.weights, key=lambda source: self.cursors[source].taken / self.weights[source])
            piece, known = self.piece(name, length - filled)
            ids[filled : filled + len(piece)], learn[filled : filled + len(piece)] = piece, known
            self.cursors[name].taken += len(piece)
            filled += len(piece)
        return ids, learn

    def piece(self, name: str, room: int) -> tuple[Ids, NDArray[np.bool_]]:
        """At most `room` ids of the source's next document, and a mask of those that count in the loss."""
        cursor = self.cursors[name]
        if name == "repeats":
            cursor.read += 1
            return self.repeats(cursor.read, room)
        epoch, place = divmod(cursor.read, self.corpus.count(name))
        document = self.corpus.document(name, int(self.order(name, epoch)[place]))
        rest = document[cursor.offset :]
        if cursor.offset:
            rest = np.concatenate(([0], rest))
        if len(rest) <= room:
            cursor.read, cursor.offset = cursor.read + 1, 0
        else:
            cursor.offset += room - (1 if cursor.offset else 0)
        return rest[:room], np.ones(min(room, len(rest)), dtype=np.bool_)

    def order(self, name: str, epoch: int) -> Ids:
        if (name, epoch) not in self.orders:
            self.orders = {key: order for key, order in self.orders.items() if key[0] != name}
            key = int(hashlib.sha256(f"{self.seed} {name} {epoch}".encode()).hexdigest()[:16], 16)
            self.orders[name, epoch] = np.random.default_rng(key).permutation(self.corpus.count(name))
        return self.orders[name, epoch]

    def repeats(self, number: int, room: int) -> tuple[Ids, NDArray[np.bool_]]:
        """A random segment, repeated. The loss ignores its first occurrence, which cannot be predicted."""
        draw = np.random.default_rng([self.seed, number])
        segment = draw.integers(len(SPECIALS), self.vocab, int(draw.integers(8, 201)))
        times = int(draw.integers(2, 5))
        ids = np.concatenate(([0], np.tile(segment, times), [1]))
        learn = np.ones(len(ids), dtype=np.bool_)
        learn[: 1 + len(segment)] = False
        return ids[:room], learn[:room]

    def state(self) -> Ids:
        """(sources, 3): the cursors in the order of their names."""
        rows = [(c.read, c.offset, c.taken) for _, c in sorted(self.cursors.items())]
        return np.array(rows, dtype=np.int64)

    def restore(self, state: Ids, weights: dict[str, float]) -> None:
        for name, (read, offset, taken) in zip(sorted(self.cursors), state.tolist(), strict=True):
            self.cursors[name] = Cursor(read, offset, taken)
        self.weights = {name: share for name, share in weights.items() if name in self.cursors}
