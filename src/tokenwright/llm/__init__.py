"""LLM, its engine over a loaded model, and the inputs and outputs of requests."""
