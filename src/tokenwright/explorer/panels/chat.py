"""The chat page's card of the model, and a conversation as a prompt; it talks by the public API."""

from dataclasses import dataclass
from typing import Literal

from tokenwright.explorer.explorer import Explorer
from tokenwright.trace.schema import TokenCard


@dataclass(frozen=True, slots=True)
class ChatModel:
    name: str  # for clients of the API
    template: bool  # it has a chat template; otherwise it continues texts
    traced: bool  # the explorer can open its runs
    context: int  # tokens of prompt and answer together
    temperature: float
    top_k: int
    top_p: float
    kind: Literal["chat"] = "chat"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    text: str
    tokens: tuple[TokenCard, ...]
    pictures: str = ""  # a name under which the server holds them, for a run
    kind: Literal["prompt"] = "prompt"


MESSAGES = (ChatModel, ChatPrompt)


def model(explorer: Explorer) -> ChatModel:
    llm = explorer.llm
    suggested = llm.sampling()
    return ChatModel(
        name=explorer.shown,
        template=llm.prepared.template is not None,
        traced=llm.prepared.traced,
        context=llm.context,
        temperature=suggested.temperature,
        top_k=suggested.top_k,
        top_p=suggested.top_p,
    )
