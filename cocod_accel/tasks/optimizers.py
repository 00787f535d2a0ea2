"""The optimizers of the trainer, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from cocod_accel.config.settings import Config
from cocod_accel.config.strict import ConfigError


def build_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """The optimizer that ``optimizer`` names."""
    options = config.optimizer
    rate, decay = options.learning_rate, options.weight_decay
    optimizer: Optimizer
    if options.name == "sgd":
        optimizer = torch.optim.SGD(
            model.parameters(), lr=rate, momentum=options.momentum, weight_decay=decay, nesterov=options.nesterov
        )
    elif options.name == "muon":
        optimizer = MuonAdamW(model, rate, decay)
    else:
        kind = Adam if options.name == "adam" else AdamW
        optimizer = kind(model.parameters(), lr=rate, weight_decay=decay)
    if options.clip_norm is not None:
        limit, parameters = options.clip_norm, list(model.parameters())
        # In the optimizer, so that whoever steps it clips: the trainer, the calibration and the simulator.
        optimizer.register_step_pre_hook(lambda *_: _clip(parameters, limit))
    return optimizer


def _clip(parameters: list[nn.Parameter], limit: float) -> None:
    nn.utils.clip_grad_norm_(parameters, limit)


class MuonAdamW(Optimizer):
    """torch's Muon for the matrices of hidden layers and its AdamW for all else, as one optimizer.

    Both take the same rate and decay: Muon's updates are scaled to the size of AdamW's. All else are vectors, embeddings and
    the output, which is the last linear layer.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float) -> None:
        matrices, others = _parted(model)
        if not matrices:
            raise ConfigError("optimizer.name=muon: the model has no matrix in a hidden layer; use adamw")
        given: list[dict[str, Any]] = [{"params": matrices, **_muon_options(lr, weight_decay)}]
        if others:
            given.append(AdamW(others, lr=lr, weight_decay=weight_decay).param_groups[0])
        super().__init__(given, {})
        self._link()

    def _link(self) -> None:
        """torch's own optimizers on these groups and this state, not on copies of them."""
        kinds: list[Any] = [torch.optim.Muon, AdamW]
        self._parts: list[Optimizer] = [kind(group["params"]) for kind, group in zip(kinds, self.param_groups, strict=False)]
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._link()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One of each."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def _muon_options(lr: float, weight_decay: float) -> dict[str, Any]:
    example = torch.optim.Muon(
        [nn.Parameter(torch.empty(1, 1))], lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return {key: value for key, value in example.param_groups[0].items() if key != "params"}


def _parted(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of hidden layers, and all other parameters."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    apart = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    apart |= {id(module.weight) for module in linear[-1:]}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() == 2 and id(parameter) not in apart]
    chosen = {id(parameter) for parameter in matrices}
    return matrices, [parameter for parameter in trained if id(parameter) not in chosen]
