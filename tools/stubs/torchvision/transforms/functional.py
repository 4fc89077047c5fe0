"""Import-only stand-in for `torchvision.transforms.functional`."""

from enum import Enum

from absent_package import functions_of


class InterpolationMode(Enum):
    """The values that appear as default arguments, and so must exist when a module is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


__getattr__ = functions_of(__name__)
