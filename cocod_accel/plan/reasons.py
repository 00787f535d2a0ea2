"""Why a plan is what it is, in words."""

from __future__ import annotations

from collections.abc import Sequence

from cocod_accel.config.settings import Config
from cocod_accel.plan.candidates import Candidate
from cocod_accel.plan.findings import ALIKE, alike
from cocod_accel.simulator.cluster import Cluster
from cocod_accel.theory import StepTimes
from cocod_accel.theory.hiding import LOSS, MARGIN, hiding_delay, lost_share


def is_uneven(cluster: Cluster) -> bool:
    """Whether proportional sampling is worth it: speeds differ by more than 5%, and by more than their jitter."""
    by_speed = sorted(cluster.workers, key=lambda group: group.speed)
    slowest, fastest = by_speed[0], by_speed[-1]
    return not alike(slowest.speed, fastest.speed, slowest.jitter, fastest.jitter)


def why_period(times: StepTimes, taken: Candidate, least: int) -> str:
    facts = f"a step takes {1e3 * times.compute_seconds:.1f} ms, an average {1e3 * times.comm_seconds:.1f} ms"
    if taken.algorithm != "cocod":  # which waits for it in every round
        waits = (times.comm_seconds + times.coding_seconds) / (taken.period * times.compute_seconds)
        return f"{facts}: the paper's; steps are {waits:.0%} longer for it"
    if times.coding_seconds:
        facts += f" and its coding {1e3 * times.coding_seconds:.1f} ms"
    under = f" while computing goes on at {1 - times.interference:.0%}" if times.interference else ""
    hides = f"the smallest that hides it, with {MARGIN:.0%} to spare"
    if (taken.delay or taken.period) < hiding_delay(times):
        hides = f"{hiding_delay(times)} would hide it, but cost more steps than it saves time"
    elif taken.period > max(least, hiding_delay(times)):
        hides = f"{hiding_delay(times)} hides it, and with it coding takes at most {LOSS:.0%} of a step"
    lost = lost_share(times, taken.period)
    return f"{facts}{under}: {hides}" + (f"; steps are {lost:.0%} longer" if lost >= 0.005 else "")


def why_batches(cluster: Cluster, config: Config) -> str:
    if config.cluster.proportional:
        return f"proportional to speeds, which differ by {max(cluster.speeds()) / min(cluster.speeds()) - 1:.0%}"
    if is_uneven(cluster):
        return f"equal: {config.algorithm.name} gives faster workers more steps instead"
    speeds = cluster.speeds()
    if max(speeds) > (1 + ALIKE) * min(speeds):
        jitter = max(group.jitter for group in cluster.workers)
        return f"equal: speeds differ by {max(speeds) / min(speeds) - 1:.0%}, less than their jitter of {jitter:.0%}"
    return f"equal: speeds differ by less than {ALIKE:.0%}"


def runs(batches: Sequence[int]) -> str:
    """4 x 32, 4 x 48 for what would fill lines."""
    runs: list[list[int]] = []
    for batch in batches:
        if runs and runs[-1][1] == batch:
            runs[-1][0] += 1
        else:
            runs.append([1, batch])
    return ", ".join(f"{count} x {batch}" for count, batch in runs)
