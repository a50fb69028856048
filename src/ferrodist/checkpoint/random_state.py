"""`RandomState`: the state of random generators, as an object in a state."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping


class RandomState:
    """Stands, in a state, for the default generators of Python, NumPy and torch, also those of GPUs in use.

    Each rank has its own: save ``PerRank(RandomState())``. Loading it sets the generators.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states."""
        has_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if has_gpus else [],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the generators.

        Raises:
            ValueError: The state is another object's, or the number of GPUs differs. Nothing was set.
        """
        if lacking := {"python", "numpy", "torch", "cuda"} - set(state_dict):
            raise ValueError(f"the state is not that of a RandomState: it lacks {', '.join(sorted(lacking))}")
        devices = state_dict["cuda"]
        if devices and len(devices) != torch.cuda.device_count():
            raise ValueError(f"the state has {counted(len(devices), 'GPU')}, and here are {torch.cuda.device_count()}")
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        if devices:
            torch.cuda.set_rng_state_all(devices)
