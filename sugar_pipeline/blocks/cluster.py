# SPDX-License-Identifier: Apache-2.0
"""``--cluster``: tasks of blocks spread over workers by Dask.

Dask starts the workers, hands out tasks, and repeats those of workers that die; there is no
scheduler of our own. A worker must see the folder of the blocks under the same path, have this
program in the same version, and offer the resource ``GPU``: one for each task at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from sugar_pipeline.blocks.block_plan import PLAN_FILE
from sugar_pipeline.blocks.block_task import AFTER_ALL, STAGES, BlockTask, TaskFailed, run_task
from sugar_utils import __version__
from sugar_utils.console import Console, clock_text
from sugar_utils.entrypoint import EXIT_OF_SIGNAL
from sugar_utils.errors import UserError, reason_of
from sugar_utils.html import duration_text
from sugar_utils.libraries import load_package

RESOURCE = "GPU"  # that every task takes one of
RETRIES = 2  # of a task that ended with an error
DEATHS = 20  # of workers during one task, after which it is given up
CONNECTING = 20.0  # seconds until a scheduler that does not answer cannot be reached
FIRST_WORKER = 600.0  # seconds until the first worker has to be there; queues take their time
_PACKAGE = "distributed"
_QUEUES = {"slurm": "SLURMCluster", "pbs": "PBSCluster"}


def run_on_cluster(tasks: Sequence[BlockTask], cluster: str, console: Console) -> None:
    """Run tasks on the workers of a cluster; each task waits for the tasks that it reads.

    Args:
        tasks: Of one plan, in an order in which each finds what it reads.
        cluster: ``local``, ``local:N`` for N workers, ``slurm``, ``pbs``, or the address of a
            scheduler, such as ``tcp://host:8786``.

    Raises:
        UserError: Workers cannot be had or do not fit, or a task has failed.
    """
    distributed, _ = _load_distributed(cluster)
    n_blocks = len({task.number for task in tasks})
    with _connected(distributed, cluster, n_blocks) as client:
        console.headline(f"cluster {cluster}: {client.dashboard_link}")
        _check_workers(client, Path(tasks[0].folder), console)
        futures = _submitted(client, tasks)
        _follow(distributed, futures, console)


def check_cluster(cluster: str) -> None:
    """Check that the packages of a kind of cluster are installed, before anything is done.

    Raises:
        UserError: They are not, or there is no such kind.
    """
    kind = cluster.partition(":")[0]
    if kind in _QUEUES:
        load_package(f"--cluster {kind}", "dask-jobqueue", "dask_jobqueue")
    elif kind not in ("local", "tcp", "tls", "ucx", "ws", "wss"):
        raise UserError(
            f"--cluster {cluster}: no such kind; use local, local:N, slurm, pbs, or the address of "
            "a scheduler such as tcp://host:8786"
        )
    if kind == "local":
        _n_workers(cluster, 1)
    _load_distributed(cluster)


def perform_on_worker(stage: str, folder: str, number: int, *previous: float) -> float:
    """Run a task on a worker, with its output in its log; return its seconds.

    Args:
        previous: Results of the tasks whose files it reads; they are only waited for.
    """
    task = BlockTask(stage, folder, number)
    start = time.monotonic()
    task.log.parent.mkdir(parents=True, exist_ok=True)
    with task.log.open("ab") as output:
        try:
            run_task(task, output)
        except KeyboardInterrupt as error:
            # Its process was stopped from outside: Dask repeats it.
            raise TaskFailed(task, EXIT_OF_SIGNAL["SIGINT"], task.log) from error
    return time.monotonic() - start


def _load_distributed(cluster: str) -> tuple[ModuleType, ...]:
    """Load Dask: the package of clients and workers, and that of settings."""
    return load_package(f"--cluster {cluster}", _PACKAGE, _PACKAGE, "dask.config")


@contextlib.contextmanager
def _connected(distributed: ModuleType, cluster: str, n_blocks: int) -> Iterator[Any]:
    """A client of the cluster; workers that it started end with it."""
    _, dask_settings = _load_distributed(cluster)
    settings = {
        "distributed.scheduler.allowed-failures": DEATHS,
        # A task holds its thread for hours.
        "distributed.worker.daemon": False,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask_settings.set(settings))
        if "://" in cluster:
            yield stack.enter_context(_client_of(distributed, cluster))
            return
        started = _started(distributed, cluster, n_blocks)
        stack.enter_context(started)
        yield stack.enter_context(distributed.Client(started))


def _client_of(distributed: ModuleType, address: str) -> Any:
    try:
        return distributed.Client(address, timeout=CONNECTING)
    except (OSError, ValueError, TimeoutError) as error:
        reason = reason_of(error)
        raise UserError(
            f"--cluster {address}: the scheduler cannot be reached ({reason}); start one with "
            "dask scheduler, or check the address"
        ) from error


def _started(distributed: ModuleType, cluster: str, n_blocks: int) -> Any:
    """Start workers here, or ask a queue for them."""
    if cluster.startswith("local"):
        return distributed.LocalCluster(
            n_workers=min(_n_workers(cluster, _n_devices()), n_blocks),
            threads_per_worker=1,
            processes=True,
            resources={RESOURCE: 1},
            dashboard_address=":0",
        )
    (jobqueue,) = load_package(f"--cluster {cluster}", "dask-jobqueue", "dask_jobqueue")
    kind = getattr(jobqueue, _QUEUES[cluster])
    try:
        # Queue, memory and time are the site's: they come from its jobqueue.yaml.
        workers = kind(worker_extra_args=["--resources", f"{RESOURCE}=1", "--nthreads", "1"])
    except (ValueError, TypeError) as error:
        reason = reason_of(error)
        raise UserError(
            f"--cluster {cluster}: {reason}; describe the queue in ~/.config/dask/jobqueue.yaml, "
            "see examples/slurm"
        ) from error
    workers.scale(jobs=n_blocks)
    return workers


def _n_workers(cluster: str, default: int) -> int:
    count = cluster.partition(":")[2]
    if not count:
        return default
    if not count.isdigit() or int(count) == 0:
        raise UserError(f"--cluster {cluster}: {count} is no number of workers; use local:2")
    return int(count)


def _n_devices() -> int:
    """Number of GPUs, or 1 for the CPU."""
    import torch

    return max(1, torch.cuda.device_count())


def _check_workers(client: Any, folder: Path, console: Console) -> None:
    """Wait for a worker, and check program, version and folder of all workers.

    Raises:
        UserError: There is none, or one lacks this program, has another version or does not see
            the folder.
    """
    try:
        client.wait_for_workers(1, timeout=FIRST_WORKER)
    except TimeoutError as error:
        raise UserError(
            f"no worker came within {FIRST_WORKER / 60:.0f} minutes; look at the queue, and at the "
            "logs of its jobs"
        ) from error
    plan_file = str(folder / PLAN_FILE)
    facts_of = client.run(_facts_of_worker, plan_file, on_error="return")
    for address, facts in facts_of.items():
        if isinstance(facts, BaseException):
            raise _without_program(address, facts) from facts
        version, sees = facts
        if version != __version__:
            raise UserError(
                f"the worker {address} has version {version} of this program, here it is "
                f"{__version__}; install the same one everywhere"
            )
        if not sees:
            raise UserError(
                f"the worker {address} does not see {folder}; give --output_dir on a disk that all "
                "workers have under the same path"
            )
    resources = [info["resources"] for info in client.scheduler_info()["workers"].values()]
    if not any(one.get(RESOURCE, 0) >= 1 for one in resources):
        raise UserError(
            f"no worker offers the resource {RESOURCE}; start them with dask worker ADDRESS "
            f"--nthreads 1 --resources {RESOURCE}=1"
        )
    console.headline(f"{len(resources)} workers")


def _without_program(address: str, error: BaseException) -> UserError:
    """Return the error of a worker that cannot import this program."""
    reason = reason_of(error)
    problem = f"cannot run this program ({reason})"
    if f"No module named '{__name__.partition('.')[0]}" in reason.replace("\\", ""):
        problem = "does not have this program"
    return UserError(
        f"the worker {address} {problem}; install it there (pip install .), or start the worker in "
        "the folder of the repository"
    )


def _facts_of_worker(plan_file: str) -> tuple[str, bool]:
    return __version__, Path(plan_file).is_file()


def _submitted(client: Any, tasks: Sequence[BlockTask]) -> dict[str, Any]:
    """Submit all tasks to the scheduler with their dependencies."""
    futures: dict[str, Any] = {}
    for task in tasks:
        earlier = []
        if task.stage != STAGES[0]:
            stage = STAGES[STAGES.index(task.stage) - 1]
            waits_for_all = task.stage in AFTER_ALL
            for other in tasks:
                if other.stage == stage and (waits_for_all or other.number == task.number):
                    earlier.append(other)
        futures[task.name] = client.submit(
            perform_on_worker,
            *task,
            *[futures[one.name] for one in earlier],
            key=f"{task.name}-{time.time_ns()}",
            resources={RESOURCE: 1},
            retries=RETRIES,
            pure=False,
        )
    return futures


def _follow(distributed: ModuleType, futures: dict[str, Any], console: Console) -> None:
    """Print finished tasks; the first task that fails for good ends the run."""
    names = {future.key: name for name, future in futures.items()}
    ended = distributed.as_completed(list(futures.values()))
    n_ended = 0

    def state(seconds: float) -> str:
        return f"{n_ended} of {len(futures)} tasks ended, {clock_text(seconds)} so far"

    with console.reporting(state):
        for future in ended:
            n_ended += 1
            _report_end(names[future.key], future, futures, n_ended, console)


def _report_end(
    name: str, future: Any, futures: dict[str, Any], n_ended: int, console: Console
) -> None:
    """Print the end of a task.

    Raises:
        UserError: It failed for good; the others are cancelled.
    """
    if future.status != "finished":
        for other in futures.values():
            other.cancel()
        reason = " ".join(str(future.exception()).split())
        raise UserError(f"{name} failed on its workers: {reason}")
    place = f"{n_ended} of {len(futures)}"
    console.headline(f"{place}: {name} took {duration_text(future.result())}")
