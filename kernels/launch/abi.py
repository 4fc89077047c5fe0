"""The version of the agreement between launcher and cubins."""

from __future__ import annotations

#: Raised whenever the meaning of a kernel parameter or of a tile image changes; another manifest's ABI is refused.
ABI = 1
