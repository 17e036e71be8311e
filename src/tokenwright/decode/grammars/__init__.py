"""Grammars: masks of the tokens that may come next. Worker processes compile them first, within limits."""
