"""OpenAI's client: a chat that is streamed, and embeddings. It needs `pip install openai`."""

from openai import OpenAI
from serving import server

with server() as url:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = [{"role": "user", "content": "Tell me a story about a cat."}]
    for chunk in client.chat.completions.create(model="stories", messages=messages, stream=True, max_tokens=40, seed=1):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    found = client.embeddings.create(model="stories", input=["The cat sat.", "The dog ran."])
    print(f"\n{len(found.data)} embeddings of {len(found.data[0].embedding)} numbers")
