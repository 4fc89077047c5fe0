"""Import-only stand-in for `torchaudio.transforms`: classes are torch modules, since models keep them as children."""

from absent_package import classes_of


def _module() -> type:
    import torch

    return torch.nn.Module


__getattr__ = classes_of(__name__, _module)
