"""GGUF files: their headers, the tensors and tokenizers in them, and how they are written."""
