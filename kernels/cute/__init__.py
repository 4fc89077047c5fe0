"""CuTe DSL sources of the kernels. Needed only to build them; `layouts` and `reference` run anywhere.

Nothing is imported here: the build environment has the compiler and no torch, a user's machine torch and no compiler.
"""
