"""Confidence intervals of paired differences, by Student's t, as a grid has only a handful of seeds."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

#: The loss of accuracy to rule out, in points.
MARGIN = 1.5
#: Two-sided 95% quantiles of Student's t for 1, 2, ..., 30 degrees of freedom.
_T95 = (
    12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814,
    2.20099, 2.17881, 2.16037, 2.14479, 2.13145, 2.11991, 2.10982, 2.10092, 2.09302, 2.08596,
    2.07961, 2.07387, 2.06866, 2.06390, 2.05954, 2.05553, 2.05183, 2.04841, 2.04523, 2.04227,
)  # fmt: skip
#: The same for the normal distribution.
_Z95 = 1.959963985


def student_t95(degrees: int) -> float:
    """The two-sided 95% quantile of Student's t.

    Beyond the table, the Cornish-Fisher expansion in 1 / ``degrees`` (Abramowitz and Stegun 26.7.5), accurate to six
    digits there.
    """
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    z, n = _Z95, degrees
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


@dataclass(frozen=True)
class Interval:
    """A paired difference in points, over seeds, with its 95% confidence interval."""

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, ours: dict[int, float], theirs: dict[int, float]) -> Interval | None:
        """Over the seeds that both have; None if fewer than two."""
        differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
        if len(differences) < 2:
            return None
        n, mean = len(differences), statistics.fmean(differences)
        half = student_t95(n - 1) * statistics.stdev(differences) / math.sqrt(n)
        return cls(mean, mean - half, mean + half, n)

    @property
    def verdict(self) -> str:
        if self.low > -MARGIN:
            return f"excludes a loss of more than {MARGIN:g} points"
        return "undecided" if self.high > -MARGIN else f"a loss of more than {MARGIN:g} points"

    def __str__(self) -> str:
        return f"{self.mean:+.2f} points (95% {self.low:+.2f} to {self.high:+.2f}, n={self.n}): {self.verdict}"
