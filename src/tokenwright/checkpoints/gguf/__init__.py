"""GGUF files: their headers, and the tensors and tokenizers in them."""
