"""S-SGD: the weighted mean gradient in every step."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from torch import Tensor

from cocod_accel.algorithms.base import Algorithm, Bucket, check_seed
from cocod_accel.averaging.codecs import make_codec
from cocod_accel.averaging.flat import FlatCopy, as_real
from cocod_accel.averaging.gradients import GradientCoder, fill
from cocod_accel.averaging.replica import Replica
from cocod_accel.comm.handles import Handle


class GradientAlgorithm(Algorithm):
    """What sends gradients, in full or coded. ``seed``: of codecs that round at random."""

    reduces_gradients: ClassVar[bool] = True
    optimizer_policies: ClassVar[tuple[str, ...]] = ("keep",)
    options: ClassVar[dict[str, Any]] = {**Algorithm.options, "seed": 0}

    #: None: gradients travel in full.
    _coder: GradientCoder | None

    def __init__(self, *, payload: str = "fp32", seed: int = 0) -> None:
        super().__init__(period=1, payload=payload)
        self.seed = check_seed(seed)
        if not self.refuses_scaler and self.payload != "fp32" and make_codec(self.payload).has_feedback:
            self.refuses_scaler = (
                f"payload={payload!r} keeps what rounding dropped for the next step, which a GradScaler would divide by "
                "another step's scale; use bf16 autocast"
            )

    def __repr__(self) -> str:
        stated = ", ".join(f"{name}={value!r}" for name, value in self.stated_options().items())
        return f"{type(self).__name__}({stated})"

    def bind(self, replica: Replica) -> Self:
        bound = super().bind(replica)
        bound._coder = None
        if self.payload != "fp32" and not replica.route.is_alone and replica.parameters:
            bound._coder = GradientCoder(self.payload, replica.parameters, replica.route, self.seed)
        return bound

    def drain(self) -> None:
        super().drain()
        if self._coder is not None:
            self._coder.settle()

    def backward_dropped(self) -> None:
        if self._coder is not None and make_codec(self.payload).has_feedback:
            raise RuntimeError(
                f"payload={self.payload!r} has kept what it dropped of a backward that no step follows, for another model's "
                "loss; call requires_grad_(False) on this model while that loss is computed, or use payload='fp32'"
            )

    def start(self, equal: bool) -> None:
        # Mean gradients keep equal models equal; they never make different ones equal.
        if not equal:
            self.replica.equalise()


class SSGD(GradientAlgorithm):
    """Synchronous SGD: in every backward, bucket by bucket::

        g <- sum_j w_j g_j

    With equal weights this is plain DDP, to the bit. With a coded ``payload`` (:mod:`cocod_accel.averaging.codecs`) all
    gradients travel at once, at the end of the backward.
    """

    name: ClassVar[str] = "ssgd"

    _handles: list[Handle]
    _flat: FlatCopy | None  # of all gradients, if they are coded

    def bind(self, replica: Replica) -> Self:
        bound = super().bind(replica)
        bound._handles = []
        bound._flat = None if bound._coder is None else FlatCopy(replica.parameters)
        return bound

    def reduce(self, bucket: Bucket) -> None:
        if self._coder is not None:
            return
        self.poll()
        self.replica.route.weights.scale_gradient_(bucket.flat)
        self._handles.append(self.replica.route.comm.launch([bucket.flat]))

    def send(self, buckets: list[Bucket]) -> None:
        if self._coder is not None and self._flat is not None:
            fill(self._flat, gradients_of(buckets))
            self._handles.append(self._coder.launch(self._flat))

    def complete(self, buckets: list[Bucket]) -> None:
        handles, self._handles = self._handles, []
        traffic = self.replica.route.traffic
        traffic.wait_for(handles)
        traffic.num_bytes += sum(handle.num_bytes for handle in handles)
        if self._coder is not None and self._flat is not None:
            self._coder.decode(self._flat)
            for parameter, gradient in gradients_of(buckets).items():
                if parameter in self._flat.views:
                    as_real(gradient).copy_(self._flat.views[parameter])

    def poll(self) -> None:
        for handle in self._handles:
            handle.poll()

    def state(self) -> Any:
        return None if self._coder is None else self._coder.state()

    def load_state(self, state: Any) -> None:
        if self._coder is not None:
            self._coder.load(state)


def gradients_of(buckets: list[Bucket]) -> dict[Tensor, Tensor]:
    """By parameter, because DDP rebuilds its buckets after the first backward."""
    return {p: g for bucket in buckets for p, g in zip(bucket.parameters, bucket.gradients, strict=True)}
