"""Drafts: tokens that are guessed and computed ahead, and what a step costs with them."""
