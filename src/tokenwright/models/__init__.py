"""A model's graph of ops, its costs, rotary angles and the sites of taps."""
