"""Import-only stand-in for `torchvision.transforms`."""

from absent_package import classes_of

from . import functional
from .functional import InterpolationMode

__all__ = ["InterpolationMode", "functional"]
__getattr__ = classes_of(__name__)
