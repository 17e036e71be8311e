"""Tensor parallel: the processes that compute one model together."""
