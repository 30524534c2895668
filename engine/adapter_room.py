"""How many adapters a stage can run together, keep pinned and mix."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from omni_engine.protocol.adapters import AdapterActivation
from omni_engine.protocol.errors import InvalidRequestError, LimitExceededError
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.sampling import MAX_SCALE
from omni_engine.stages.config import EngineArgs


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """Places for adapters on a worker's device.

    Args:
        places: adapters on the device at most.
        mixed: different ones in one batch at most; None if adapters are not mixed.
    """

    places: int
    mixed: int | None

    @classmethod
    def of(cls, arguments: EngineArgs, capabilities: PipelineCapabilities | None) -> AdapterRoom:
        """Return the room of a stage whose pipeline is known, or not yet."""
        mixes = capabilities is None or capabilities.mixes_adapters
        return cls(arguments.max_loras, arguments.mixed_adapters_limit if mixes else None)

    def check(self, activation: AdapterActivation | None, pinned: Collection[str]) -> None:
        """Refuse what can never run.

        Args:
            activation: what a request asks for.
            pinned: the pinned contents.

        Raises:
            LimitExceededError: if it needs more adapters at once than fit.
            InvalidRequestError: if an adapter's scales together are out of range.
        """
        if activation is None:
            return
        for adapter, scale in zip(activation.adapters, activation.scales, strict=True):
            if abs(scale) > MAX_SCALE:
                raise InvalidRequestError(
                    f"the scales of adapter {adapter.name!r} come to {scale:g} together",
                    field="lora_request.scale",
                    value=scale,
                    expected=f"a sum from {-MAX_SCALE:g} to {MAX_SCALE:g}",
                )
        needed = [digest for digest in activation.digests if digest not in pinned]
        if self.mixed is not None and len(activation.digests) > self.mixed:
            raise _too_many(len(activation.digests), f"{self.mixed} (max_mixed_adapters)")
        if len(needed) > (free := self.places - len(pinned)):
            less = f", less {len(pinned)} pinned" if pinned else ""
            raise _too_many(
                len(needed),
                f"{free} (max_loras = {self.places}{less})",
                " besides the pinned ones" if pinned else "",
            )

    def check_pins(self, name: str, pinned: int, in_use: int) -> None:
        """Refuse to pin an adapter whose place is needed by those that are not pinned.

        Args:
            name: the adapter's.
            pinned: places of pinned adapters, this one's included.
            in_use: places that some live request needs beside them.

        Raises:
            LimitExceededError: if too few places would stay free.
        """
        free = max(self.mixed or 1, in_use)
        if pinned + free > self.places:
            raise LimitExceededError(
                f"adapter {name!r} can't be pinned: {pinned} would be, and {free} of "
                f"{self.places} places must stay free",
                field="pin",
                value=pinned,
                expected=f"at most {max(0, self.places - free)} pinned adapters "
                f"(max_loras = {self.places})",
                hint="Unpin another, or raise max_loras"
                + (" or lower max_mixed_adapters." if self.mixed else "."),
            )


def _too_many(number: int, at_most: str, besides: str = "") -> LimitExceededError:
    return LimitExceededError(
        f"the request needs {number} adapters at once{besides}",
        field="lora_request",
        value=number,
        expected=f"at most {at_most}",
    )
