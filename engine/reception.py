"""Where requests are judged: at once, or when their model is loaded and their adapters checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omni_engine.engine.adapters import AdapterRegistry
from omni_engine.engine.admission import Admission, AdmittedRequest
from omni_engine.engine.live_request import LiveRequest
from omni_engine.engine.parking import Parking
from omni_engine.protocol.errors import OmniError, UnknownAdapterError


class Reception:
    """Admits the requests of one stage, parks them, or refuses them.

    Args:
        registry: the stage's adapters.
        admit: told of an admitted request, with the time.
        refuse: told of a parked request that is refused, why, and the time.

    Attributes:
        parking: the requests that can't be judged yet.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        admit: Callable[[LiveRequest, AdmittedRequest, float], None],
        refuse: Callable[[LiveRequest, OmniError, float], None],
    ) -> None:
        self.parking = Parking()
        self._registry = registry
        self._admit, self._refuse = admit, refuse
        self._admission: Admission | None = None

    @property
    def is_open(self) -> bool:
        """Whether it is known what the stage's model can do."""
        return self._admission is not None

    @property
    def defaults(self) -> dict[str, Any] | None:
        """What requests get that leave sampling parameters out; None while that is not known."""
        return None if self._admission is None else self._admission.defaults

    def take_in(self, live: LiveRequest, now: float) -> None:
        """Judge a new request, or park it.

        Raises:
            OmniError: why it is refused.
        """
        if self._admission is None:
            self._registry.awaiting(live.adapters_asked, look=False)
            self.parking.park(live)
            return
        checked = self._admission.check(live.request)
        if awaited := self._registry.awaiting(live.adapters_asked):
            self.parking.park(live, awaited)
        else:
            self._admit(live, self._admission.admit(live.request, checked), now)

    def open(self, admission: Admission, now: float) -> None:
        """Judge the requests that came while the model was loaded, and all that follow."""
        self._admission = admission
        for live in self.parking.release_all():
            self._judge(live, admission, now, look=True)

    def release(self, name: str, reason: OmniError | None, now: float) -> None:
        """Judge the requests that waited for an adapter.

        Args:
            name: the adapter's.
            reason: why it may not be registered any more.
            now: seconds, monotonic.
        """
        if self._admission is not None:
            for live in self.parking.release(name):
                self._judge(live, self._admission, now, look=False, reason=reason)

    def _judge(
        self,
        live: LiveRequest,
        admission: Admission,
        now: float,
        *,
        look: bool,
        reason: OmniError | None = None,
    ) -> None:
        try:
            if awaited := self._registry.awaiting(live.adapters_asked, look=look):
                admission.check(live.request)
                self.parking.park(live, awaited)
            else:
                self._admit(live, admission.admit(live.request), now)
        except OmniError as error:
            gone = isinstance(error, UnknownAdapterError)
            self._refuse(live, reason if gone and reason is not None else error, now)
