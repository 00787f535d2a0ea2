"""Section 4.1: how fast CoCoD-SGD converges, the speedup with more workers, and bounds on the period."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cocod_accel.theory.checks import check_count, check_real

#: Section 5: CIFAR, 16 workers with a batch of 32, 120 epochs, and a period of 5 after the first ten epochs.
PAPER_WORKERS = 16
PAPER_PERIOD = 5
#: T follows from these; the paper does not state it. 97 whole steps per epoch, as in ``plan_workers``.
PAPER_ITERATIONS = 120 * (50_000 // (PAPER_WORKERS * 32))


@dataclass(frozen=True)
class Problem:
    """The constants of Assumption 1 and of the start. Unknown for deep networks; they show which terms dominate."""

    #: L: every local gradient is L-Lipschitz, eq. (4).
    lipschitz: float
    #: sigma: its square bounds the variance of one sample's gradient on one worker, eq. (7).
    sigma: float
    #: zeta: its square bounds how far workers' gradients are from their mean, eq. (8); 0 if they have the same data.
    zeta: float
    #: f(x_0) - f*: how far the loss may still fall.
    initial_gap: float

    def __post_init__(self) -> None:
        check_real("lipschitz", self.lipschitz)
        check_real("sigma", self.sigma)
        check_real("zeta", self.zeta, zero=True)
        check_real("initial_gap", self.initial_gap, zero=True)


def theorem1_factors(lipschitz: float, learning_rate: float, period: int) -> tuple[float, float]:
    """D_1 = 1 - 2 k D_2 and D_2 = 8 gamma^2 L^2 k / (1 - 16 gamma^2 k^2 L^2), eq. (10).

    The theorem only requires gamma <= 1 / L. It is meaningful only if D_2 is also finite and positive and D_1 is
    positive, i.e. 32 gamma^2 k^2 L^2 < 1, which is stricter for every period.
    """
    check_real("lipschitz", lipschitz)
    check_real("learning_rate", learning_rate)
    check_count("period", period)
    fix = f"use a learning rate below 1 / (sqrt(32) k L) = {1 / (math.sqrt(32) * period * lipschitz):.6g}"
    if learning_rate * lipschitz > 1:
        raise ValueError(f"learning_rate={learning_rate} is above 1 / L = {1 / lipschitz:.6g}, Theorem 1's condition; {fix}")
    drift = 16 * (learning_rate * period * lipschitz) ** 2
    if drift >= 1:
        raise ValueError(
            f"learning_rate={learning_rate} and period={period}: 16 gamma^2 k^2 L^2 = {drift:.6g} must be below 1 "
            f"for D_2; {fix}"
        )
    d2 = 8 * (learning_rate * lipschitz) ** 2 * period / (1 - drift)
    d1 = 1 - 2 * period * d2
    if d1 <= 0:
        raise ValueError(
            f"learning_rate={learning_rate} and period={period}: D_1 = {d1:.6g} must be positive for Theorem 1 to "
            f"give a bound; {fix}"
        )
    return d1, d2


def theorem1_bound(
    problem: Problem, *, learning_rate: float, period: int, num_iterations: int, batches: Sequence[int]
) -> float:
    """Theorem 1, eq. (9), general_threorem_result: a bound on D_1 times the mean of E|grad f(x_t)|^2 over all t.

    2 (f(x_0) - f*) / (T gamma)  +  D_2 (N sigma^2 / sum M + 2 k zeta^2)  +  gamma L sigma^2 / sum M
    """
    _, d2 = theorem1_factors(problem.lipschitz, learning_rate, period)
    check_count("num_iterations", num_iterations)
    noise = problem.sigma**2 / _total(batches)
    start = 2 * problem.initial_gap / (num_iterations * learning_rate)
    return start + d2 * _spread(problem, period, batches) + learning_rate * problem.lipschitz * noise


def theorem1_gradient_bound(
    problem: Problem, *, learning_rate: float, period: int, num_iterations: int, batches: Sequence[int]
) -> float:
    """Theorem 1 divided by D_1 (corollary_convergence in the appendix): a bound on the mean of E|grad f(x_t)|^2."""
    d1, _ = theorem1_factors(problem.lipschitz, learning_rate, period)
    bound = theorem1_bound(
        problem, learning_rate=learning_rate, period=period, num_iterations=num_iterations, batches=batches
    )
    return bound / d1


def corollary1_learning_rate(sigma: float, num_iterations: int, batches: Sequence[int]) -> float:
    """Corollary 1: gamma = 1 / (sigma sqrt(T / sum M))."""
    check_real("sigma", sigma)
    check_count("num_iterations", num_iterations)
    return math.sqrt(_total(batches) / num_iterations) / sigma


@dataclass(frozen=True)
class IterationCondition:
    """The three terms of eq. (11), convergence_condition, named for what each ensures: T must be at least each.

    The third is always the largest: at least 3 N^2 times the second, which is 48 k^2 times the first.
    """

    #: L^2 sum M / sigma^2: gamma <= 1 / L.
    for_learning_rate: float
    #: 48 sum M L^2 k^2 / sigma^2: D_1 >= 1/2.
    for_d1: float
    #: 144 (sum M)^3 L^2 k^2 (N sigma^2 / sum M + 2 k zeta^2)^2 / sigma^6: D_2's term is at most sigma L / sqrt(T sum M).
    for_d2: float

    @property
    def least(self) -> int:
        """The fewest iterations that satisfy all three."""
        return math.ceil(max(self.for_learning_rate, self.for_d1, self.for_d2))


def corollary1_condition(problem: Problem, *, period: int, batches: Sequence[int]) -> IterationCondition:
    """Corollary 1's condition on the number of iterations, eq. (11)."""
    check_count("period", period)
    total = _total(batches)
    base = total * (problem.lipschitz / problem.sigma) ** 2
    spread = _spread(problem, period, batches) * total / problem.sigma**2
    return IterationCondition(base, 48 * base * period**2, 144 * base * (period * spread) ** 2)


def corollary1_rate(problem: Problem, *, period: int, num_iterations: int, batches: Sequence[int]) -> float:
    """Corollary 1, eq. (12), convergence_rate: 4 sigma (f(x_0) - f* + L) / sqrt(T sum M).

    A bound on the mean of E|grad f(x_t)|^2 with Corollary 1's learning rate; T must satisfy its condition.
    """
    check_count("num_iterations", num_iterations)
    condition = corollary1_condition(problem, period=period, batches=batches)
    if num_iterations < condition.least:
        raise ValueError(
            f"num_iterations={num_iterations} is fewer than Corollary 1's condition requires with period={period}; "
            f"use at least {condition.least}, or a shorter period"
        )
    return 4 * problem.sigma * (problem.initial_gap + problem.lipschitz) / math.sqrt(num_iterations * _total(batches))


def iterations_to_reach(problem: Problem, epsilon: float, *, period: int, batches: Sequence[int]) -> int:
    """Remarks 1 and 2: the fewest iterations for which Corollary 1 bounds the mean of E|grad f(x_t)|^2 by epsilon.

    From its rate, T = (4 sigma (f(x_0) - f* + L) / epsilon)^2 / sum M: twice the samples per step, half the steps. That
    holds until its condition requires more; the smaller epsilon, the longer it holds.
    """
    check_real("epsilon", epsilon)
    wanted = (4 * problem.sigma * (problem.initial_gap + problem.lipschitz) / epsilon) ** 2 / _total(batches)
    return max(math.ceil(wanted), corollary1_condition(problem, period=period, batches=batches).least)


def iteration_speedup(speeds: Sequence[float]) -> float:
    """Remarks 1 and 2 in eq. (2), def_is: IS = T_1 / T_N = sum C_i / C_1; N if all are equal.

    Batches are proportional to speeds; worker 1, the slowest, takes the base batch (as in section 5.3).
    """
    if not speeds:
        raise ValueError("speeds=[] is empty; give one relative speed per worker")
    for index, speed in enumerate(speeds):
        check_real(f"speeds[{index}]", speed)
    return math.fsum(speeds) / min(speeds)


def scaled_learning_rate(base: float, speeds: Sequence[float]) -> float:
    """Remark 4: gamma_N = gamma_1 sum C_i / C_1, for a fixed number of epochs; N gamma_1 if all are equal.

    ``base`` is the rate of one worker with the base batch, which is the slowest worker's.
    """
    check_real("base", base)
    return base * iteration_speedup(speeds)


def period_bound(num_iterations: int, num_workers: int, constant: float) -> float:
    """Remark 3: k = constant * T^(1/4) / N^(3/4). The paper says O(...); pass the constant. May be below 1."""
    check_count("num_iterations", num_iterations)
    check_count("num_workers", num_workers)
    check_real("constant", constant)
    return constant * math.pow(num_iterations, 0.25) / math.pow(num_workers, 0.75)


#: The constant with which the bound is 5 for the paper's T and N: a period that worked, not the longest possible.
PAPER_CONSTANT = PAPER_PERIOD / period_bound(PAPER_ITERATIONS, PAPER_WORKERS, 1.0)


def paper_period_bound(num_iterations: int, num_workers: int) -> float:
    """The bound of Remark 3 scaled through section 5: 5 (T / 11,640)^(1/4) (16 / N)^(3/4). Used for warnings."""
    return period_bound(num_iterations, num_workers, PAPER_CONSTANT)


def communication_rounds(num_iterations: int, period: int) -> dict[str, int]:
    """How often each algorithm communicates in T iterations: every step, or once per started round (Algorithm 1).

    For ``asynlocal``, T is the slowest worker's; the others take more steps in the same rounds.
    """
    check_count("num_iterations", num_iterations)
    check_count("period", period)
    rounds = -(-num_iterations // period)
    return {"ssgd": num_iterations, "pipe": num_iterations, "local": rounds, "cocod": rounds, "asynlocal": rounds}


def communication_complexity(num_iterations: int, num_workers: int, constant: float) -> float:
    """Remark 3: T / k = T^(3/4) N^(3/4) / constant rounds with :func:`period_bound`; S-SGD and Pipe-SGD: T."""
    return num_iterations / period_bound(num_iterations, num_workers, constant)


def _total(batches: Sequence[int]) -> int:
    """sum M_i."""
    if not batches:
        raise ValueError("batches=[] is empty; give one batch size per worker")
    for index, batch in enumerate(batches):
        check_count(f"batches[{index}]", batch)
    return sum(batches)


def _spread(problem: Problem, period: int, batches: Sequence[int]) -> float:
    """N sigma^2 / sum M + 2 k zeta^2: how much local models drift apart."""
    return len(batches) * problem.sigma**2 / _total(batches) + 2 * period * problem.zeta**2
