"""Anthropic's client: a message that is streamed. It needs `pip install anthropic`."""

from anthropic import Anthropic
from serving import server

with server() as url:
    client = Anthropic(base_url=url, api_key="none")
    talk = [{"role": "user", "content": "Tell me a story about a dog."}]
    with client.messages.stream(model="stories", messages=talk, max_tokens=40) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
        print(f"\n{stream.get_final_message().usage.output_tokens} tokens")
