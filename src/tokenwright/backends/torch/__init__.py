"""The torch backend: the oracle of every test, and the fallback without compiled kernels."""
