"""OpenAI's APIs: completions, chat completions, embeddings, responses, and the ids of texts."""
