"""The arithmetic of a step behind one protocol. The reference in torch is always there and is every test's oracle."""

from tokenwright.backends.protocol import Dense, Kernels, Linear, Span
from tokenwright.backends.torch.kernels import ReferenceKernels
from tokenwright.models.rotary import Rotation

__all__ = ["Dense", "Kernels", "Linear", "ReferenceKernels", "Rotation", "Span"]
