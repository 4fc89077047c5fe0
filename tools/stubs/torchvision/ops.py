"""Import-only stand-in for `torchvision.ops`."""

from absent_package import functions_of

__getattr__ = functions_of(__name__)
