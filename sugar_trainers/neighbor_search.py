# SPDX-License-Identifier: Apache-2.0
"""Nearest neighbours of all Gaussians as a component: fields are sums over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gaussian_splatting.engine.component import Component, IterationRules
from gaussian_splatting.engine.model import TrainableCloud
from gaussian_splatting.engine.state_schema import ANY, N, StateRule
from sugar_trainers.stage_config import CoarseConfig
from sugar_utils.neighbors import nearest_neighbors

NEIGHBORS = "neighbors"  # name of the rows in checkpoints


class NeighborSearch(Component):
    """Searches neighbours when they are due or missing, in iterations that need them.

    Args:
        is_needed: Whether an iteration evaluates fields.
    """

    name = NEIGHBORS
    obeys_step_mask = True
    schema = (StateRule(NEIGHBORS, (N, ANY), is_rows=True),)

    def __init__(
        self, model: TrainableCloud, config: CoarseConfig, is_needed: Callable[[int], bool]
    ) -> None:
        self._model = model
        self._config = config
        self._is_needed = is_needed
        self.indices: Tensor | None = None  # those of the last search. (N, K) int32

    def rules(self, iteration: int) -> IterationRules:
        """Whether neighbours are needed and old, and so are searched."""
        interval = self._config.schedule.neighbor_interval
        is_due = self.indices is None or iteration % interval == 0
        return IterationRules(begins_with_model=is_due and self._is_needed(iteration))

    def begin(self, iteration: int) -> None:
        """Search, if that is due."""
        if self.rules(iteration).begins_with_model:
            means = self._model.cloud.means.detach()
            batch = self._config.knn_batch_size
            result = nearest_neighbors(means, self._config.n_neighbors, query_batch=batch)
            if self.indices is None:
                self.indices = result.indices
            else:
                # A recorded pass reads them where they were when it was recorded.
                self.indices.copy_(result.indices)

    def found(self) -> Tensor:
        """Neighbours of the last search. (N, K) int32

        Raises:
            ValueError: There was none: :meth:`begin` was not called for this iteration.
        """
        if self.indices is None:
            raise ValueError("neighbours are searched when an iteration begins")
        return self.indices

    def keep_rows(self, rows: Tensor) -> None:
        """Drop neighbours after rows have changed."""
        self.indices = None

    def state(self) -> dict[str, Tensor]:
        """Neighbours of the last search, not of the current positions."""
        return {} if self.indices is None else {NEIGHBORS: self.indices}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take the rows back; without them the next iteration searches."""
        if NEIGHBORS in state:
            self.indices = state[NEIGHBORS].to(self._model.device)
