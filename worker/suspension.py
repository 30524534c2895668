"""Where a pipeline's call is suspended: methods of its heavy modules, wrapped on the instance."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent

from omni_engine.worker.call_rules import Kind
from omni_engine.worker.fusion import Call, CallReader
from omni_engine.worker.progress import main_thread

_ENCODER_ROWS = {"input_ids": Kind.ROWS, "attention_mask": Kind.ROWS}


class Role(enum.Enum):
    """What a suspended call does for its request."""

    ENCODE = "encode"
    """A text encoder's forward: many arrive at once, and the same prompt comes again."""
    DENOISE = "denoise"
    """A denoiser's forward: what a tick runs."""
    DECODE = "decode"
    """An autoencoder's decode: large, and only one per picture."""


class Suspended(NamedTuple):
    """A call that waits to be answered, and where it was made."""

    point: SuspensionPoint
    call: Call


class SuspensionPoint:
    """A wrapped method of one module.

    A call from inside a request's greenlet is handed to the greenlet's call object; any other call
    goes straight to the original. The wrapper must stay outside of anything compiled.

    Args:
        module: the module.
        role: what its calls do.
        component: the pipeline's name for the module; None if it is no component of its own.
        observed: how its arguments combine, as far as probing found out.

    Attributes:
        direct_calls: calls from outside of any request's greenlet.
        splits: whether outputs of shared calls can be split; one that could not is not shared
            again.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        role: Role,
        *,
        component: str | None = None,
        observed: Mapping[str, Kind] | None = None,
    ) -> None:
        self.module, self.role, self.component = module, role, component
        self._method = "decode" if role is Role.DECODE else "forward"
        self._original: Callable[..., Any] = getattr(module, self._method)
        rules = {**(observed or {}), **(_ENCODER_ROWS if role is Role.ENCODE else {})}
        self._reader = CallReader(module, self._original, rules)
        self.direct_calls = 0
        self.splits = True
        setattr(module, self._method, self._wrapper())

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method as it was."""
        main_thread.mark()
        try:
            output = self._original(*args, **kwargs)
            main_thread.forwards += self.role is Role.DENOISE
            return output
        finally:
            main_thread.mark()

    def remove(self) -> None:
        """Restore the method."""
        self.module.__dict__.pop(self._method, None)

    def _wrapper(self) -> Callable[..., Any]:
        def suspending(*args: Any, **kwargs: Any) -> Any:
            request = getattr(getcurrent(), "call", None)
            if request is None:
                self.direct_calls += 1
                return self.run(*args, **kwargs)
            return request.suspend(Suspended(self, self._read(args, kwargs)))

        suspending.__signature__ = self._reader.signature  # type: ignore[attr-defined]
        return suspending

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call = self._reader.read(args, kwargs)
        if self.role is Role.ENCODE:
            if not _is_plain_text(call):
                call.shareable = False
            elif "use_cache" in self._reader.signature.parameters:
                call.arguments.setdefault("use_cache", False)  # a cache of keys has no rows
                call.kinds["use_cache"] = Kind.SAME
        return call


def _is_plain_text(call: Call) -> bool:
    """Whether an encoder sees tokens only: pictures' patches and caches are no rows."""
    return all(
        value is None or name in _ENCODER_ROWS or isinstance(value, bool | int | str)
        for name, value in call.arguments.items()
    )
