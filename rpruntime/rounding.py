"""fp32 arithmetic on Python numbers. Pure: no torch."""

from __future__ import annotations

import math
import struct


def rounded_to_single(value: float) -> float:
    """`value` as fp32 has it."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)
