"""The executable specification: every format and every step of VC-Attention in eager torch, on any device.

Readable beside the paper ("VC-Attention: Value Smoothing and Softmax Casting for Low-bit Attention", arXiv 2609.15810,
2026). Every kernel is compared with it; it is for checking, never for speed.
"""
