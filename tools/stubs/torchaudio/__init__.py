"""Import-only stand-in for torchaudio, see `absent_package`."""

from absent_package import functions_of

from . import functional, transforms

__version__ = "0.0.0+stub"
__all__ = ["functional", "transforms"]
__getattr__ = functions_of(__name__)
