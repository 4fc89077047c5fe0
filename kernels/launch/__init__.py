"""Launching the prebuilt kernels: manifest and file checks, the CUDA driver through ctypes, and the attention call."""
