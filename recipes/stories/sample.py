"""Text from a trained model with the naive loop: every token recomputes the whole text."""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from recipes.stories.data import ASSISTANT, END, USER
from recipes.stories.model import Model

PROMPTS = ("Once upon a time", "The next day is bright", "The capital of France is", "def add(a, b):")
QUESTIONS = ("What is the capital of France?", "What is the capital of Japan? Answer in one word.",
             "Is Python an interpreted language?", "Is Python an interpreted language? Answer in one word.",
             "Who are you?", "What is the opposite of hot? Answer in one word.", "Tell me a story.")  # fmt: skip
STOPS = (1, 4)


@dataclass(frozen=True)
class Drawing:
    """How to choose the next token: the argmax at temperature 0, else a sample with `top_p`."""

    temperature: float = 0.0
    top_p: float = 0.95
    most: int = 100


def prompt_ids(tokenizer: Tokenizer, prompt: str, chat: bool = False) -> list[int]:
    text = f"{USER}{prompt}{END}{ASSISTANT}" if chat else prompt
    return list(tokenizer.encode(text).ids)


@torch.inference_mode()
def continue_ids(model: Model, ids: list[int], drawing: Drawing, seed: int = 0) -> list[int]:
    """The ids of the continuation, up to a stop token, which is left out."""
    source, written = torch.Generator().manual_seed(seed), list[int]()
    while len(written) < drawing.most and len(ids) + len(written) < model.config.context:
        logits = model(torch.tensor([ids + written]))[0, -1].float()  # V
        token = pick(logits, drawing, source)
        if token in STOPS:
            break
        written.append(token)
    return written


def pick(logits: torch.Tensor, drawing: Drawing, source: torch.Generator) -> int:
    if drawing.temperature == 0:
        return int(logits.argmax())
    chances, order = (logits / drawing.temperature).softmax(-1).sort(descending=True)
    chances[chances.cumsum(-1) - chances >= drawing.top_p] = 0
    return int(order[torch.multinomial(chances, 1, generator=source)])


def continue_text(model: Model, tokenizer: Tokenizer, prompt: str, drawing: Drawing, seed: int = 0) -> str:
    """The prompt's continuation; prompts in QUESTIONS are formatted as chat."""
    chat = prompt in QUESTIONS
    written = continue_ids(model, prompt_ids(tokenizer, prompt, chat), drawing, seed)
    return str(tokenizer.decode(written))
