"""S-SGD: the weighted mean gradient in every step."""

from __future__ import annotations

from typing import ClassVar, Self

from cocod_accel.algorithms.base import Algorithm, Bucket
from cocod_accel.averaging.replica import Replica
from cocod_accel.comm.handles import Handle


class SSGD(Algorithm):
    """Synchronous SGD: in every backward, bucket by bucket::

        g <- sum_j w_j g_j

    With equal weights this is plain DDP, to the bit.
    """

    name: ClassVar[str] = "ssgd"
    reduces_gradients: ClassVar[bool] = True
    optimizer_policies: ClassVar[tuple[str, ...]] = ("keep",)
    payloads: ClassVar[tuple[str, ...]] = ("fp32",)

    _handles: list[Handle]

    def __init__(self) -> None:
        super().__init__(period=1)

    def __repr__(self) -> str:
        return "SSGD()"

    def bind(self, replica: Replica) -> Self:
        bound = super().bind(replica)
        bound._handles = []
        return bound

    def start(self, equal: bool) -> None:
        # Mean gradients keep equal models equal; they never make different ones equal.
        if not equal:
            self.replica.equalise()

    def reduce(self, bucket: Bucket) -> None:
        self.poll()
        self.replica.route.weights.scale_gradient_(bucket.flat)
        self._handles.append(self.replica.route.comm.launch([bucket.flat]))

    def complete(self, buckets: list[Bucket]) -> None:
        handles, self._handles = self._handles, []
        self.replica.route.traffic.wait_for(handles)
        self.replica.route.traffic.num_bytes += sum(handle.num_bytes for handle in handles)

    def poll(self) -> None:
        for handle in self._handles:
            handle.poll()
