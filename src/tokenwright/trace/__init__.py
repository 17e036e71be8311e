"""Looking at a run: what a step did, by counting and by the clock; and what it must cost, from shapes alone.

Nothing is imported here: the schema needs no torch, and a server that only waits for its model has none yet.
"""
