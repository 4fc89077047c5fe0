"""Import-only stand-in for torchvision, see `absent_package`."""

from . import models, ops, transforms

__version__ = "0.0.0+stub"
__all__ = ["models", "ops", "transforms"]
