"""LLM, its engine over a loaded model, their inputs and outputs."""
