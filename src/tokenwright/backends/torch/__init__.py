"""The torch backend: every test's oracle, and the fallback without compiled kernels."""
