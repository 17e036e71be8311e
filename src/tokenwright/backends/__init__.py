"""The arithmetic of a step behind one protocol. The torch reference is always available and is every test's oracle."""

from tokenwright.backends.protocol import Backend, Dense, Kernels, Linear, Logits, Scored
from tokenwright.backends.torch.reference_kernels import ReferenceKernels

__all__ = ["Backend", "Dense", "Kernels", "Linear", "Logits", "ReferenceKernels", "Scored"]
