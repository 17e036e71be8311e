"""Runs vision towers, and keeps their results in bounded memory."""
