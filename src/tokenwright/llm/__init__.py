"""The front door: LLM, its engine over a loaded model, what goes into it and what comes out."""
