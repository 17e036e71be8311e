"""A model's speed on this machine, and how near it is to the machine's limits: for `tokenwright bench` and benchmarks/.

`limits.py` measures the machine, `measures.py` defines the measures of a model, `model.py` compares a model with its
limits, and `shapes.py` writes checkpoints of published shapes with random weights.
"""
