"""Import-only stand-in for `torchvision.models.optical_flow`."""

from absent_package import functions_of

__getattr__ = functions_of(__name__)
