"""OpenAI's /v1/responses, and the store of those that are kept."""
