"""A model's graph of ops, and what follows from it: costs, rotary angles and the sites of taps."""
