"""Section 4 of the paper as functions: convergence rates, bounds on the period, and step times.

Arithmetic only: no torch, no imports from the rest of the package. Equation numbers and labels are those of the paper
(Shen et al. 2019); docs/theory.md has the formulas, worked examples, and what they do not say. Symbols that functions share:

    num_iterations T   steps every worker takes          batches M_i   samples per step of each of the N workers
    period k           steps per round                   speeds C_i    samples per second of each worker (ratios count)
"""

from __future__ import annotations

from cocod_accel.theory.convergence import (
    PAPER_CONSTANT,
    PAPER_ITERATIONS,
    PAPER_PERIOD,
    PAPER_WORKERS,
    IterationCondition,
    Problem,
    communication_complexity,
    communication_rounds,
    corollary1_condition,
    corollary1_learning_rate,
    corollary1_rate,
    iteration_speedup,
    iterations_to_reach,
    paper_period_bound,
    period_bound,
    scaled_learning_rate,
    theorem1_bound,
    theorem1_factors,
    theorem1_gradient_bound,
)
from cocod_accel.theory.failures import Failures
from cocod_accel.theory.times import (
    StepTimes,
    cocod_bounded_step_seconds,
    cocod_speedup,
    cocod_step_seconds,
    hiding_period,
    local_speedup,
    local_step_seconds,
    pipe_bounded_step_seconds,
    pipe_speedup,
    pipe_step_seconds,
    speedups,
    ssgd_speedup,
    ssgd_step_seconds,
    step_seconds,
)

__all__ = [
    "PAPER_CONSTANT",
    "PAPER_ITERATIONS",
    "PAPER_PERIOD",
    "PAPER_WORKERS",
    "Failures",
    "IterationCondition",
    "Problem",
    "StepTimes",
    "cocod_bounded_step_seconds",
    "cocod_speedup",
    "cocod_step_seconds",
    "communication_complexity",
    "communication_rounds",
    "corollary1_condition",
    "corollary1_learning_rate",
    "corollary1_rate",
    "hiding_period",
    "iteration_speedup",
    "iterations_to_reach",
    "local_speedup",
    "local_step_seconds",
    "paper_period_bound",
    "period_bound",
    "pipe_bounded_step_seconds",
    "pipe_speedup",
    "pipe_step_seconds",
    "scaled_learning_rate",
    "speedups",
    "ssgd_speedup",
    "ssgd_step_seconds",
    "step_seconds",
    "theorem1_bound",
    "theorem1_factors",
    "theorem1_gradient_bound",
]
