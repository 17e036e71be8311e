"""A model's arithmetic behind one protocol. The reference in torch is the oracle of every test."""

from tokenwright.backends.protocol import Backend, Logits, Scored

__all__ = ["Backend", "Logits", "Scored"]
