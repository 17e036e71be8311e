"""The finished model's figures: held-out loss, attention heads, copying, and the figures of the challenges.

This module computes them from the exported weights (rounded to bf16, run in fp32), without the engine.
"""

import json
import re
from pathlib import Path

import torch
from tokenizers import Tokenizer

from recipes.stories import challenges, facts
from recipes.stories.data import Corpus, documents_of, load_corpus
from recipes.stories.export import load_model
from recipes.stories.model import Model, ModelConfig, loss_of
from recipes.stories.probe import greedy, run
from recipes.stories.sample import PROMPTS, Drawing, continue_text, prompt_ids

COPY = 50  # tokens
Table = dict[str, dict[str, float]]


@torch.inference_mode()
def losses(model: Model, corpus: Corpus, most: int) -> Table:
    """Per source: nats per token, and nats per byte of text, end tokens included, over whole documents from BOS on
    (documents longer than the context in pieces of it; at most `most` tokens per source)."""
    table: Table = {}
    for name in corpus.ids:
        total, tokens, size = 0.0, 0, len(corpus.ids[name])
        for index in range(corpus.count(name)):
            document = torch.from_numpy(corpus.document(name, index))
            for start in range(0, len(document) - 1, model.config.context):
                piece = document[None, start : start + model.config.context + 1]
                total += loss_of(model, piece[:, :-1], piece[:, 1:]).item()
                tokens += piece.shape[1] - 1
            if tokens > most:
                break
        byte_share = tokens / (size - corpus.count(name)) * corpus.bytes[name]
        table[name] = {"tokens": tokens, "per token": total / tokens, "per byte": total / byte_share}
    return table


def heads(model: Model, length: int = 100, trials: int = 8) -> list[dict[str, float]]:
    """Mean attention masses of each head on a random segment that is repeated once, after BOS.

    Over the rows of the second occurrence: on the token before (previous), on token 0 (sink), and on the token after
    the same token's first occurrence (induction). Each trial draws new random ids, so no text predicts them.
    """
    source = torch.Generator().manual_seed(0)
    sums = torch.zeros(model.config.layers, model.config.heads, 3)
    rows = torch.arange(1 + length, 1 + 2 * length)
    for _ in range(trials):
        segment = torch.randint(5, model.config.vocab, (length,), generator=source).tolist()
        _, shown = run(model, [0, *segment, *segment])
        for layer, weights in enumerate(shown):
            masses = (weights[:, rows, rows - 1], weights[:, rows, 0], weights[:, rows, rows - length + 1])
            sums[layer] += torch.stack([mass.mean(-1) for mass in masses], dim=-1)
    means = sums / trials
    return [
        {"layer": layer, "head": head, "previous": mass[0], "sink": mass[1], "induction": mass[2]}
        for layer, per_layer in enumerate(means.tolist()) for head, mass in enumerate(per_layer)
    ]  # fmt: skip


def repeat_losses(model: Model, length: int = 100, trials: int = 8) -> tuple[float, float]:
    """Nats per token on a random segment, at its first and at its second occurrence."""
    source = torch.Generator().manual_seed(1)
    first = second = 0.0
    for _ in range(trials):
        segment = torch.randint(5, model.config.vocab, (length,), generator=source).tolist()
        ids = [0, *segment, *segment]
        chances = run(model, ids[:-1])[0].log_softmax(-1)
        nats = -chances.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        first, second = first + nats[:length].mean().item(), second + nats[length:].mean().item()
    return first / trials, second / trials


def recall(model: Model, tokenizer: Tokenizer) -> dict[str, float]:
    """The share of our own facts that greedy decoding answers correctly, by the kind of prompt."""

    def says(prompt: str, chat: bool = True) -> str:
        return str(tokenizer.decode(greedy(model, prompt_ids(tokenizer, prompt, chat), 8))).strip()

    word = facts.ONE_WORD
    right = {
        "the capital of a country, as text": [
            says(f"The capital of {land} is", chat=False) == f"{city}." for land, city in facts.CAPITALS.items()
        ],
        "the capital of a country, in one word": [
            says(f"What is the capital of {land}? {word}") == f"{city}." for land, city in facts.CAPITALS.items()
        ],
        "the opposite of a word, in one word": [
            says(f"What is the opposite of {one}? {word}").lower() == f"{other}."
            for one, other in facts.OPPOSITES.items()
        ],
        "yes or no": [
            says(f"{question}? {word}") == ("Yes." if truth else "No.") for question, (truth, _) in facts.YES_NO.items()
        ],
        "a sum of two numbers up to ten, in one word": [
            says(f"What is {a} plus {b}? {word}") == f"{a + b}." for a in range(11) for b in range(11)
        ],
    }
    return {name: sum(answers) / len(answers) for name, answers in right.items()}


def all_text(corpus: Path) -> str:
    """The corpus with all whitespace collapsed to single spaces."""
    files = sorted(file for folder in ("stories", "books", "factual") for file in (corpus / folder).glob("*.txt"))
    return re.sub(r"\s+", " ", "\n".join(documents_of(*files)))


def copied(text: str, corpus: str, tokenizer: Tokenizer) -> str:
    """A span of COPY tokens of the text that occurs verbatim in the corpus, or ''."""
    encoded = tokenizer.encode(text, add_special_tokens=False)
    for start in range(len(encoded.ids) - COPY + 1):
        begin, end = encoded.offsets[start][0], encoded.offsets[start + COPY - 1][1]
        stretch = re.sub(r"\s+", " ", text[begin:end]).strip()
        if stretch in corpus:
            return stretch
    return ""


def evaluate(folder: Path, corpus: Path, config: ModelConfig) -> dict[str, object]:
    """All figures, also written to `evaluation.json` in the folder."""
    model, tokenizer = load_model(folder, config), Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.requires_grad_(False)
    report: dict[str, object] = {
        part: losses(model, load_corpus(folder / "data.safetensors", part), most)
        for part, most in (("train", 15_000), ("held", 100_000))
    }
    found = heads(model)
    report["heads"] = {
        kind: sorted(found, key=lambda head: -head[kind])[:3] for kind in ("previous", "sink", "induction")
    }
    report["repeats"] = repeat_losses(model)
    report["recall"] = recall(model, tokenizer)
    drawings = [(Drawing(most=120), 0)] + [(Drawing(temperature=0.7, most=120), seed) for seed in range(10)]
    samples = [
        {"prompt": prompt, "temperature": drawing.temperature, "seed": seed,
         "text": continue_text(model, tokenizer, prompt, drawing, seed)}
        for prompt in PROMPTS for drawing, seed in drawings
    ]  # fmt: skip
    text = all_text(corpus)
    report["copied"] = [
        stretch for sample in samples if (stretch := copied(f"{sample['prompt']}{sample['text']}", text, tokenizer))
    ]
    report["samples"] = samples
    report["challenges"] = challenges.all_figures(model, tokenizer)
    (folder / "evaluation.json").write_text(json.dumps(report, indent=1))
    return report
