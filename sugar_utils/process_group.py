# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training: several processes that train one model, started by torchrun.

Every process has the same parameters and renders other views; gradients are summed over the
processes. Numbers that the host needs go through gloo, tensors of a GPU through NCCL where torch
has it. Only the first process writes; where one fails, all end, and one prints the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sugar_utils.errors import TrainingError, UserError
from sugar_utils.memory import out_of_memory
from sugar_utils.torchrun import Launch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TIMEOUT = timedelta(days=7)  # the other processes wait while the first one extracts a mesh
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
_BITS = {2: torch.int16, 4: torch.int32}  # integers by the size of an element
T = TypeVar("T")


class PeerLost(UserError):
    """Another process of the run ended; raised by the next collective call."""

    exit_code = 4


class ProcessGroup:
    """The processes of a run, seen from one of them; for a single process, calls do nothing.

    Every method but the properties, :meth:`share` and :meth:`single_report` is a collective call:
    all processes make it, in the same order, and none goes on before all have.

    Args:
        rank: Number of this process.
        size: Number of processes.
        store: Shared by all; None for a single process.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        self.rank = rank
        self.size = size
        self._store = store

    def __deepcopy__(self, memo: dict) -> ProcessGroup:
        """Return the same object: copies of settings belong to the same processes."""
        return self

    @classmethod
    def join(cls, launch: Launch, *, cuda: bool) -> ProcessGroup:
        """Connect to the other processes.

        Raises:
            UserError: They cannot be reached, or torch has no ``torch.distributed``.
        """
        if launch.size == 1:
            return cls()
        if not dist.is_available():
            raise UserError(
                f"torch {torch.__version__} has no torch.distributed; start one process"
            )
        # torch exports it without an entry in ``__all__``.
        prefix_store = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
        uses_nccl = cuda and dist.is_nccl_available()
        from torch.distributed.rendezvous import rendezvous

        try:
            store, _, _ = next(iter(rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT)))
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if uses_nccl else "gloo",
                store=prefix_store("group", store),
                rank=launch.rank,
                world_size=launch.size,
                timeout=TIMEOUT,
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).split("\n")[0]
            raise UserError(
                f"process {launch.rank} cannot reach the other {launch.size - 1} ({reason}); "
                "check --master_addr and --master_port of torchrun"
            ) from error
        return cls(launch.rank, launch.size, prefix_store("run", store))

    @property
    def is_alone(self) -> bool:
        """Whether there is one process only."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def share(self, n: int) -> range:
        """This process's part of ``n`` items, a multiple of the number of processes."""
        n_each = n // self.size
        return range(self.rank * n_each, (self.rank + 1) * n_each)

    def sum_(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by its sum over all processes, the same bits in each."""
        self._collective(lambda: dist.all_reduce(tensor))

    def broadcast_(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by that of the first process, of the same shape."""
        self._collective(lambda: dist.broadcast(tensor, src=0))

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather whole numbers of all processes, as many of each, in the order of the processes."""
        if self.is_alone:
            return [list(numbers)]
        row = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        rows = [torch.empty_like(row) for _ in range(self.size)]
        self._collective(lambda: dist.all_gather(rows, row))
        return [row.tolist() for row in rows]

    def all_gather(self, value: T) -> list[T]:
        """Gather small values of all processes, in the order of the processes."""
        values: list = [value] * self.size
        self._collective(lambda: dist.all_gather_object(values, value))
        return values

    def broadcast(self, value: T) -> T:
        """Return the first process's value; those of the others are ignored."""
        values = [value]
        host = torch.device("cpu")
        self._collective(lambda: dist.broadcast_object_list(values, src=0, device=host))
        return values[0]

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self.all_gather_numbers([0])

    def check_same(self, tensors: Iterable[Tensor], iteration: int) -> None:
        """Check that all processes have the same tensors.

        Raises:
            TrainingError: They have not.
        """
        if self.is_alone:
            return
        sums = []
        for tensor in tensors:
            bits = tensor.detach().view(_BITS[tensor.element_size()])
            sums.append(bits.sum(dtype=torch.int64))
        rows = self.all_gather_numbers(torch.stack(sums).tolist())
        if any(row != rows[0] for row in rows):
            raise TrainingError(
                f"the processes no longer hold the same Gaussians at iteration {iteration}; the "
                "last good checkpoint is kept: use GPUs of one model and continue from it"
            )

    @contextmanager
    def single_report(self) -> Iterator[None]:
        """Let the process that failed first print its error.

        The others end because their next collective call fails; their errors are silent, with the
        exit code of the first one.
        """
        if self.is_alone:
            yield
            return
        try:
            yield
        except UserError as error:
            code = self._claim(error.exit_code)
            error.silent = code is not None
            if code is not None:
                error.exit_code = code
            raise
        except BaseException:
            # A defect has its traceback; the others need not add that they lost a process.
            self._claim(1)
            raise

    def _claim(self, exit_code: int) -> int | None:
        """Claim to be the first that failed; None if it is so, else the exit code of the first."""
        assert self._store is not None, "several processes share a store"
        claim = f"{self.rank} {exit_code}"
        try:
            first_claim = self._store.compare_set("first failure", "", claim).decode()
        except RuntimeError:
            # The process that has the store is gone.
            return None
        first_rank, first_exit_code = first_claim.split()
        return None if int(first_rank) == self.rank else int(first_exit_code)

    def _collective(self, call: Callable[[], object]) -> None:
        if self.is_alone:
            return
        try:
            call()
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            raise PeerLost(
                "another process of this run exited unexpectedly, as when it is killed; the last "
                "checkpoint stays: start again to continue from it"
            ) from error


ALONE = ProcessGroup()  # a single process


def leave_process_group() -> None:
    """Destroy the process group if it was initialised."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
