"""How a delayed scale follows from a history, as graphs and the scaling state agree on it."""

from __future__ import annotations

import dataclasses

from fp8_compile.kernels.formats import format_with_max

from .roles import Role

# By significand bits, for inputs and gradients. Measured (benchmarks/margins.py): SQNR stays the same to 0.01 dB on
# normal, log-normal and row-scaled data, and the larger gradients of a short batch fit in. Weights change little in a
# step.
MARGINS = {2: 2, 3: 6, 4: 2}


@dataclasses.dataclass(frozen=True)
class UpdateRule:
    """The user's choices; the formula is in ``kernels/delayed_scaling.py``."""

    margin: int = 0  # beyond what the format and role of a tensor have: MARGINS
    algorithm: str = "max"
    interval: int = 1

    @property
    def arguments(self) -> tuple[str, int]:
        """As the operations take them. The margin is not among them: it is part of the state, a number per slot."""
        return self.algorithm, self.interval

    def margin_of(self, role: Role, largest: float) -> int:
        """The margin of a tensor in the format whose largest number is ``largest``."""
        by_format = 0 if role is Role.WEIGHT else MARGINS[format_with_max(largest).significand_bits]
        return by_format + self.margin
