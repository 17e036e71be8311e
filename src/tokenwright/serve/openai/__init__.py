"""OpenAI's APIs: completions, chat completions, embeddings and responses."""
