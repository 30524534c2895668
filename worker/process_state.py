"""Process-wide torch state that belongs to one request while it runs.

Greenlets share their thread's state: grad mode, autocast and the global random generators. Each
request gets its own, swapped at every switch; what one pipeline sets never reaches another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class TorchModes:
    """Grad mode and autocast as they are in the current thread; equal modes may share a forward."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool

    @classmethod
    def current(cls) -> TorchModes:
        """Return the modes that are on now."""
        autocast = tuple(
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _AUTOCAST_DEVICES
        )
        return cls(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled())

    def apply(self) -> None:
        """Make these the current thread's modes."""
        torch.set_grad_enabled(self.grad)
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)


@dataclass(slots=True)
class RandomState:
    """States of the global random generators: the CPU's and each CUDA device's that is in use."""

    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...] = ()

    @classmethod
    def current(cls) -> RandomState:
        """Return the states of now."""
        started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all() if started else []
        return cls(torch.get_rng_state(), tuple(cuda))

    @classmethod
    def seeded(cls, seed: int) -> RandomState:
        """Return the states that ``torch.manual_seed(seed)`` would leave, leaving none behind."""
        before = cls.current()
        torch.manual_seed(seed)
        state = cls.current()
        before.apply()
        return state

    def apply(self) -> None:
        """Put the generators into these states."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))


@dataclass(slots=True)
class ProcessState:
    """Everything process-wide that is swapped when a request is entered or left."""

    modes: TorchModes
    random: RandomState

    @classmethod
    def current(cls) -> ProcessState:
        """Return the state of now."""
        return cls(TorchModes.current(), RandomState.current())

    def apply(self) -> None:
        """Make this the process's state."""
        self.modes.apply()
        self.random.apply()
