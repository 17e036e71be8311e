"""JSON of a form: a Pydantic model says it, the answer follows it, and `parsed` is an object of the model."""

from typing import Literal

from pydantic import BaseModel

from tokenwright import LLM


class Animal(BaseModel):
    kind: Literal["cat", "dog", "bird"]
    color: Literal["red", "blue", "brown"]
    happy: bool


with LLM("stories") as llm:
    talk = [{"role": "user", "content": "Lily has a happy brown dog. Describe it."}]
    done = llm.chat(talk, response_format=Animal, max_tokens=60, temperature=0)
    print(repr(done.parsed))
