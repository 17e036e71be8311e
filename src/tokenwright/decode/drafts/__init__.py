"""Drafts: guessed tokens that are computed ahead, and the cost of a step with them. The sampler accepts them."""
