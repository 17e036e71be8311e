"""Grammars: masks of the tokens that may come next, compiled within limits in processes of their own."""
