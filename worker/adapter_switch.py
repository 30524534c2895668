"""Switches adapters before a batch or a tick, whatever the pipeline can do."""

from __future__ import annotations

import logging
from typing import Any

from omni_engine.protocol.errors import ModelError, OmniError
from omni_engine.protocol.outputs import AppliedLoRA
from omni_engine.protocol.plans import AdapterActivation
from omni_engine.worker.lora import AdapterManager
from omni_engine.worker.results import text_of

logger = logging.getLogger(__name__)


class AdapterSwitch:
    """Makes the adapter of a batch active.

    Args:
        manager: None for a pipeline without LoRA support.
        stepper: a ``CooperativeStepper`` to tell of it; None for a hand-written pipeline.
    """

    def __init__(self, manager: AdapterManager | None, stepper: Any = None) -> None:
        self._manager, self._stepper = manager, stepper

    def activate(self, activation: AdapterActivation | None) -> list[AppliedLoRA]:
        """Make exactly this adapter active, or none; returns what outputs report.

        Raises:
            OmniError: if the adapter can't be switched.
        """
        if self._manager is None:
            return []
        if self._stepper is not None:
            self._stepper.use_adapter(None if activation is None else activation.identity)
        try:
            return self._manager.activate(activation)
        except OmniError:
            raise
        except Exception as error:  # boundary: one batch; what peft may raise is not known
            logger.exception("an adapter could not be switched")
            reason = f"the adapter could not be switched: {text_of(error)}"
            raise ModelError(reason) from None
