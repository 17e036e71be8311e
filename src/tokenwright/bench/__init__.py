"""How fast a model is here, and how near to what the machine allows: for `tokenwright bench` and for benchmarks/.

`limits.py` measures the machine, `measures.py` says what is measured of a model, `model.py` measures one beside its
limits, and `shapes.py` makes models of published shapes with random weights.
"""
