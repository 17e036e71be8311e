"""Tools: the model calls a Python function, and goes on with its result.

The small model inside was not made for tools, so it is told to call one; a larger one decides by itself (auto).
"""

from typing import Literal

from tokenwright import LLM


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    return {"Oslo": "snow", "Rome": "sun"}[city]


with LLM("stories") as llm:
    talk = [{"role": "user", "content": "How is the weather in Rome?"}]
    asked = llm.chat(talk, tools=[weather], tool_choice="required", parallel_tool_calls=False, max_tokens=60, seed=1)
    talk.append(asked.message)
    for call in asked.tool_calls:
        result = weather(**call.values)
        print(f"{call.name}({call.arguments}) is {result}")
        talk.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(llm.chat(talk, tools=[weather], max_tokens=20, seed=1).content)
