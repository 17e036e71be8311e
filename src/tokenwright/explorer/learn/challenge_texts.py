"""The texts of the challenges: the same for every model."""

from collections.abc import Sequence

from tokenwright.llm.llm import LLM

QUESTION = "Is Python an interpreted language?"
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play in the park with her dog. One day, Lily "
    "and her dog went to the park. They saw a big tree with red apples. Lily wanted to eat an apple, but the tree was "
    "too tall. She asked her mom for help. Her mom smiled and"
)
OPENING = "One day, a boy named Ben"
QUESTIONS = ("What did Lily see?", "Who was with Lily?", "What did Lily want?", "Whom did Lily ask?")


def asked(llm: LLM, question: str) -> list[int]:
    """As a conversation where the model has a chat template, else as a text."""
    if llm.loaded.template is None:
        return llm.tokenizer.encode(question)
    return list(llm.render([{"role": "user", "content": question}]).ids)


def repeated(ids: Sequence[int], tokens: int) -> list[int]:
    return (list(ids) * (-(-tokens // len(ids))))[:tokens]


def quoted(llm: LLM, ids: Sequence[int]) -> str:
    return llm.tokenizer.decode(list(ids)).replace("\n", " ").strip()[:80]
