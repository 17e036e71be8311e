"""The part of the `gguf` library that reads files: its constants and its formats, which scripts/site puts beside this.

The library's own first module imports a writer and vocabularies, with what those need.
"""

from gguf.constants import GGMLQuantizationType

__all__ = ["GGMLQuantizationType"]
