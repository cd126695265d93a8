# SPDX-License-Identifier: Apache-2.0
"""Several processes that train one model together, as torchrun starts them.

Every process holds the same parameters, renders its own views and adds its gradients to those of
the others. Numbers that the host needs travel through gloo, tensors of a GPU through NCCL where
torch has it. Only the first process writes; where one fails, all end, and one says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sugar_utils.errors import TrainingError, UserError
from sugar_utils.memory import out_of_memory
from sugar_utils.torchrun import Launch

TIMEOUT = timedelta(days=7)  # for the others: the first one may extract a mesh meanwhile
_BITS = {2: torch.int16, 4: torch.int32}
T = TypeVar("T")


class PeerLost(UserError):
    exit_code = 4


class ProcessGroup:
    """The processes of a run, seen from one of them; of a single process calls change nothing.

    Every method but the properties, :meth:`share` and :meth:`single_report` is a collective call:
    all processes make it, in the same order, and none goes on before all have.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: dist.Store | None = None) -> None:
        self.rank = rank
        self.size = size
        self._store = store

    def __deepcopy__(self, memo: dict) -> ProcessGroup:
        """The same: settings that are copied still belong to the processes there are."""
        return self

    @classmethod
    def join(cls, launch: Launch, *, cuda: bool) -> ProcessGroup:
        if launch.size == 1:
            return cls()
        if not dist.is_available():
            raise UserError(
                f"torch {torch.__version__} has no torch.distributed; start one process"
            )
        nccl = cuda and dist.is_nccl_available()
        try:
            store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(minutes=10))))
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if nccl else "gloo",
                store=dist.PrefixStore("group", store),
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
        return cls(launch.rank, launch.size, dist.PrefixStore("run", store))

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, n: int) -> range:
        """This process's part of ``n`` things, a multiple of the number of processes."""
        each = n // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def sum_(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by its sum over all processes, the same bits in each."""
        self._collective(lambda: dist.all_reduce(tensor))

    def broadcast_(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by that of the first process, of the same shape."""
        self._collective(lambda: dist.broadcast(tensor, src=0))

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Whole numbers of all processes, in their order; as many of each."""
        if self.is_alone:
            return [list(numbers)]
        mine = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self._collective(lambda: dist.all_gather(rows, mine))
        return [row.tolist() for row in rows]

    def all_gather(self, value: T) -> list[T]:
        """Small values of all processes, in their order."""
        values: list = [value] * self.size
        self._collective(lambda: dist.all_gather_object(values, value))
        return values

    def broadcast(self, value: T) -> T:
        """The first process's value; those of the others are ignored."""
        values = [value]
        host = torch.device("cpu")
        self._collective(lambda: dist.broadcast_object_list(values, src=0, device=host))
        return values[0]

    def barrier(self) -> None:
        self.all_gather_numbers([0])

    def check_same(self, tensors: Iterable[Tensor], iteration: int) -> None:
        """Stop (TrainingError) where the processes no longer hold the same bits."""
        if self.is_alone:
            return
        sums = [t.detach().view(_BITS[t.element_size()]).sum(dtype=torch.int64) for t in tensors]
        rows = self.all_gather_numbers(torch.stack(sums).tolist())
        if any(row != rows[0] for row in rows):
            raise TrainingError(
                f"the processes no longer hold the same Gaussians at iteration {iteration}; the "
                "last good checkpoint is kept: use GPUs of one model and continue from it"
            )

    @contextmanager
    def single_report(self) -> Iterator[None]:
        """A context whose errors one process reports: the one that failed first.

        The others leave because their next collective call fails; their errors are silent, with its
        exit code.
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
            # A defect speaks for itself; the others need not add that they lost a process.
            self._claim(1)
            raise

    def _claim(self, exit_code: int) -> int | None:
        """Be the one that reports a failure; the exit code of who was first, None if we are."""
        mine = f"{self.rank} {exit_code}"
        try:
            found = self._store.compare_set("first failure", "", mine).decode()
        except RuntimeError:
            # The process that kept the store is gone.
            return None
        return None if found.split()[0] == str(self.rank) else int(found.split()[1])

    def _collective(self, call: Callable[[], object]) -> None:
        if self.is_alone:
            return
        try:
            call()
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            raise PeerLost(
                "another process of this run ended without a word, as when it is killed; the last "
                "checkpoint stays: start again to continue from it"
            ) from error


ALONE = ProcessGroup()  # a single process


def leave_process_group() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
