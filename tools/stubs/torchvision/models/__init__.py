"""Import-only stand-in for `torchvision.models`."""

from absent_package import functions_of

from . import optical_flow

__all__ = ["optical_flow"]
__getattr__ = functions_of(__name__)
