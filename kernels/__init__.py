"""Low-bit attention as a library: plans, backends and their reasons. There is no ComfyUI in here."""

from .grouping import Labels, auto_groups, group
from .guard import agreement, least_agreement, sample_heads, sample_rows
from .launch.verdicts import set_folder
from .measures import add_sums, error_sums, measures, sampled_sums
from .ops import attention
from .plan import BLOCK, EXACT, FAITHFUL, FAST, FOUR_BIT, PRESETS, Plan
from .reasons import Ok, Reason, UnsupportedError
from .registry import BackendStatus, backends, describe_device, preset, supports

__all__ = [
    "BLOCK",
    "EXACT",
    "FAITHFUL",
    "FAST",
    "FOUR_BIT",
    "PRESETS",
    "BackendStatus",
    "Labels",
    "Ok",
    "Plan",
    "Reason",
    "UnsupportedError",
    "add_sums",
    "agreement",
    "attention",
    "auto_groups",
    "backends",
    "describe_device",
    "error_sums",
    "group",
    "least_agreement",
    "measures",
    "preset",
    "sample_heads",
    "sample_rows",
    "sampled_sums",
    "set_folder",
    "supports",
]
