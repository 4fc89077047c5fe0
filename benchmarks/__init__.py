"""Measurements of this package. Scripts run by path: `python benchmarks/fidelity.py`."""
