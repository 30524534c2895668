"""Keeps what certification found, so that a model is certified once and not at every start.

One small JSON file per certificate, under ``$OMNI_ENGINE_CACHE``, ``$XDG_CACHE_HOME/omni-engine``
or ``~/.cache/omni-engine``, named by everything that the finding depends on. A file that can't be
read or doesn't say what it should counts as none; one that can't be written is done without.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

from omni_engine.worker.call_rules import Kind
from omni_engine.worker.fusion_report import FusionReport, Source

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "OMNI_ENGINE_CACHE"
_MAX_BYTES = 1 << 20
_MAX_TEXT = 4000


@dataclass(frozen=True, slots=True)
class ListCallChoice:
    """Whether batches run as one list call, and the times in milliseconds that decided it."""

    chosen: bool
    list_ms: float
    step_ms: float


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is kept of one model under one set of circumstances.

    Attributes:
        report: what certification found.
        list_call: what warm-up chose; None where it didn't choose.
    """

    report: FusionReport
    list_call: ListCallChoice | None = None


class CertificateStore:
    """Where the certificate of one pipeline under one key is kept.

    Args:
        key: everything the certificate depends on; None keeps nothing.
        components: the components that may have observed rules.
        folder: where the files lie; None keeps nothing.
    """

    def __init__(
        self, key: Mapping[str, Any] | None, components: frozenset[str], folder: Path | None
    ) -> None:
        self._key, self._components = key, components
        self._path: Path | None = None
        if key is not None and folder is not None:
            digest = sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
            self._path = folder / "certificates" / f"{digest[:32]}.json"
        self._warned = False

    def load(self) -> Certificate | None:
        """Return the certificate; None if there is none that can be used."""
        if self._path is None:
            return None
        try:
            with self._path.open("rb") as file:
                data = file.read(_MAX_BYTES)
            stored = _File.model_validate_json(data)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._warn("read", error)
            return None
        if stored.key != self._key or not self._components >= set(stored.observed):
            self._warn("used", "it is another model's")
            return None
        return stored.certificate()

    def save(self, certificate: Certificate) -> None:
        """Keep a certificate in the place of an earlier one; what was not certified isn't kept."""
        report, choice = certificate.report, certificate.list_call
        if self._path is None or self._key is None or report.certified_at is None:
            return
        stored = _File(
            key=dict(self._key),
            certified_at=report.certified_at,
            fused=report.fused,
            finding=" ".join(report.finding.split())[:_MAX_TEXT],
            encoders=report.encoders,
            sources=dict(report.sources),
            observed={name: dict(rules) for name, rules in report.observed.items()},
            tolerance=report.tolerance,
            list_call=None
            if choice is None
            else _ListCall(chosen=choice.chosen, list_ms=choice.list_ms, step_ms=choice.step_ms),
        )
        try:
            write_whole(self._path, stored.model_dump_json(indent=1).encode())
        except OSError as error:
            self._warn("written", error)

    def _warn(self, what: str, why: object) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("certificate %s can't be %s: %s", self._path, what, why)


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return where this user's certificates lie; None if there is no such place."""
    if named := environment.get(CACHE_VARIABLE):
        return Path(named).expanduser().absolute()
    base = Path(environment.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # as the XDG specification wants it
        try:
            base = Path.home() / ".cache"
        except RuntimeError:  # a user without a home
            return None
    return base / "omni-engine"


def _printable(text: str) -> str:
    """Accept what a terminal can be shown."""
    if not text.isprintable():
        raise ValueError("not printable")
    return text


class _ListCall(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    chosen: bool
    list_ms: Annotated[float, Field(ge=0)]
    step_ms: Annotated[float, Field(ge=0)]


class _File(BaseModel):
    """What a file says; nothing else in it is accepted."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    key: dict[str, JsonValue]
    certified_at: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d \d\d:\d\d UTC$")]
    fused: bool
    finding: Annotated[str, Field(max_length=_MAX_TEXT), AfterValidator(_printable)]
    encoders: bool
    sources: dict[str, Source]
    observed: dict[str, dict[str, Kind]]
    tolerance: Annotated[float, Field(ge=0)] | None
    list_call: _ListCall | None

    def certificate(self) -> Certificate:
        report = FusionReport(
            self.fused,
            self.finding,
            encoders=self.encoders,
            sources=self.sources,
            observed=self.observed,
            certified_at=self.certified_at,
            cached=True,
            tolerance=self.tolerance,
        )
        choice = self.list_call
        if choice is None:
            return Certificate(report)
        return Certificate(report, ListCallChoice(choice.chosen, choice.list_ms, choice.step_ms))


def write_whole(path: Path, data: bytes) -> None:
    """Write a file as a whole or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:  # whatever it is: clean up, then pass it on
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
