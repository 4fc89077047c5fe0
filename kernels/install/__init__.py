"""Brings the kernel wheels of the cards that are here into the pack. `install.py` is its door.

Standard library only, down to `..cards`, `..detect` and `..families`: it runs before torch can be imported, in any
Python that runs ComfyUI, and starts no other program.
"""
