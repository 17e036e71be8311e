"""Strands calls its tool twice, then has the answer, through each API. python strands_agents.py URL"""

import json
import sys

from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.ollama import OllamaModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel

URL = sys.argv[1]
OPENAI = {"client_args": {"base_url": f"{URL}/v1", "api_key": "none"}, "model_id": "tiny"}
MODELS = {
    "strands, chat": OpenAIModel(**OPENAI),
    "strands, responses": OpenAIResponsesModel(**OPENAI),
    "strands, Anthropic": AnthropicModel(
        client_args={"base_url": URL, "api_key": "none"}, model_id="tiny", max_tokens=99
    ),
    "strands, Ollama": OllamaModel(URL, model_id="tiny"),
}


@tool
def weather(city: str) -> str:
    """The weather."""
    return f"warm in {city}"


found = {}
for name, model in MODELS.items():
    agent = Agent(model=model, tools=[weather], callback_handler=None)
    answer = str(agent("How is the weather in Oslo and Rome?")).strip()
    results = [part["toolResult"] for message in agent.messages for part in message["content"] if "toolResult" in part]
    found[name] = [*(one["content"][0]["text"] for one in results), answer]
print(json.dumps(found))
