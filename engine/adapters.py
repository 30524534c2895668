"""The adapter registry: what names mean now; kept in the frontend, which never reads the files.

A name means a content: the file as a worker found it when it checked it. Requests are admitted by
what is in force; they ask no worker. A file that changed is checked again before it counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from omni_engine.engine.adapter_checks import Check, CheckQueue
from omni_engine.engine.adapter_contents import ContentsInForce
from omni_engine.engine.registered_adapter import (
    RegisteredAdapter,
    Settled,
    file_state,
    unknown_adapter,
)
from omni_engine.protocol.adapters import AdapterActivation, AdapterReport, compose
from omni_engine.protocol.errors import (
    InvalidRequestError,
    ModelLoadError,
    OmniError,
    StageUnavailableError,
)
from omni_engine.protocol.sampling import LoRARequest, canonical_scale
from omni_engine.stages.config import EngineArgs

_MAX_REPEATS = 3
"""Checks in a row of a file that keeps changing, before requests get what is in force."""


class AdapterRegistry:
    """The adapters of one stage.

    Args:
        arguments: the stage's settings; its adapters wait to be checked.

    Attributes:
        checks: the checks that the registry wants.
        contents: what is in force.

    Raises:
        ConfigError: if an adapter's file is missing.
    """

    def __init__(self, arguments: EngineArgs) -> None:
        self.checks = CheckQueue()
        self.contents = ContentsInForce()
        self._entries: dict[str, RegisteredAdapter] = {}
        self._loading: dict[str, RegisteredAdapter] = {}
        self._checked: dict[int, RegisteredAdapter] = {}
        self._unusable: OmniError | None = None
        default = arguments.default_lora
        self._default = () if default is None else (LoRARequest(default.name, default.scale),)
        for module in arguments.lora_modules:
            scale = canonical_scale(module.default_scale)
            path = str(module.resolved_file())
            entry = RegisteredAdapter(module.name, path, scale, module.pin, module.preload)
            self._entries[module.name] = entry
            self._ask(entry)
        self._unsettled = set(self._entries.values())

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use, oldest first."""
        return tuple(n for n, entry in self._entries.items() if self._loading.get(n) is not entry)

    @property
    def settled(self) -> bool:
        """Whether every adapter of the configuration has had a verdict, or is gone."""
        return not self._unsettled

    @property
    def preloaded(self) -> list[RegisteredAdapter]:
        """The adapters with a content in force that workers load before anybody asks."""
        return [entry for entry in self._entries.values() if entry.preload and entry.adapter]

    def __len__(self) -> int:
        """Return how many names are taken, those included that are being loaded."""
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        """Tell whether a name is taken."""
        return name in self._entries

    def entries(self) -> Iterable[RegisteredAdapter]:
        """Return what all names mean, oldest first."""
        return self._entries.values()

    def get(self, name: str, field: str = "lora_request.name") -> RegisteredAdapter:
        """Return what a name means.

        Args:
            name: of an adapter.
            field: where it stands, for the error.

        Raises:
            UnknownAdapterError: if the name is not registered.
        """
        if (entry := self._entries.get(name)) is None:
            raise unknown_adapter(name, self.names, field)
        return entry

    def digest_of(self, name: str) -> str | None:
        """Return the content that a name means; None if it means none."""
        entry = self._entries.get(name)
        return None if entry is None else entry.digest

    # -- requests

    def wanted(self, asked: Sequence[LoRARequest] | None) -> Sequence[LoRARequest]:
        """Return the adapters that a request asks for, the stage's default if it asks for none."""
        return self._default if asked is None else asked

    def awaiting(self, asked: Sequence[LoRARequest] | None, *, look: bool = True) -> frozenset[str]:
        """Return the names whose check must end before a request can be admitted.

        Args:
            asked: as of the request.
            look: whether to look if files have changed. A request that has waited for a check
                takes what is in force then.

        Raises:
            UnknownAdapterError: if a name is not registered.
        """
        names = dict.fromkeys(one.name for one in self.wanted(asked))
        entries = [self.get(name) for name in names]
        if look and self._unusable is None:
            for entry in entries:
                self._look_at(entry)
        awaited = set()
        for entry in entries:
            if entry.check is not None and (look or entry.adapter is None):
                self.checks.hurry(entry.check)
                awaited.add(entry.name)
        return frozenset(awaited)

    def resolve(self, asked: Sequence[LoRARequest] | None) -> AdapterActivation | None:
        """Return what a request runs under: its own adapters, the stage's default, or none.

        Raises:
            UnknownAdapterError: if a name is not registered.
            OmniError: why a registered adapter is unusable.
        """
        parts = []
        for one in self.wanted(asked):
            entry = self.get(one.name)
            if entry.adapter is None:
                error = entry.error or ModelLoadError(f"adapter {one.name!r} is being checked")
                raise error.with_traceback(None)  # else it grows with every raise
            parts.append((entry.adapter, entry.default_scale if one.scale is None else one.scale))
        return compose(parts)

    # -- verdicts

    def settle(
        self, check: Check, report: AdapterReport | None, error: OmniError | None
    ) -> Settled:
        """Act on the verdict of a check that ``checks`` knows no more.

        Args:
            check: what was checked.
            report: what the file holds, if it is good.
            error: why it is not.
        """
        entry = self._checked.pop(check.check_id)
        if entry.changed and check.repeats < _MAX_REPEATS and self._unusable is None:
            self._ask(entry, urgent=True, repeats=check.repeats + 1)
            return Settled(entry, done=False, open=True)
        self._unsettled.discard(entry)
        entry.check = retired = None
        if report is not None:
            retired = self._take(entry, report)
        else:
            error = error or ModelLoadError(f"adapter {entry.name!r} could not be checked")
            self._refuse(entry, error)
            if isinstance(error, StageUnavailableError):  # it says nothing of the file
                entry.seen = None
        current = self._entries.get(entry.name)
        still = current is not None and current.check is not None
        return Settled(entry, error, open=still, retired=retired)

    def refuse_checks(self, error: OmniError) -> list[Settled]:
        """Settle every check with an error: nobody can do it."""
        settled = []
        for check in self.checks.drain():
            self._checked[check.check_id].changed = False  # it would be asked for again
            settled.append(self.settle(check, None, error))
        return settled

    def give_up(self, error: OmniError) -> list[Settled]:
        """Take no adapters at all from now on: the pipeline has no use for them."""
        self._unusable = error
        return self.refuse_checks(error)

    # -- management

    def load(self, entry: RegisteredAdapter, *, replace: bool) -> None:
        """Register an adapter once its file is found to be good.

        Until then a name that is replaced means what it meant, and requests that name a new one
        wait.

        Args:
            entry: what the name is to mean.
            replace: whether the name may be in use.

        Raises:
            InvalidRequestError: if the name is in use, or being loaded.
            OmniError: if the stage takes no adapters.
        """
        if self._unusable is not None:
            raise self._unusable.with_traceback(None)
        name = entry.name
        if name in self._loading:
            raise InvalidRequestError(
                f"adapter {name!r} is being loaded already",
                field="name",
                value=name,
                hint="Wait for the answer to the first call.",
            )
        if name in self._entries and not replace:
            raise InvalidRequestError(
                f"an adapter named {name!r} is registered already",
                field="name",
                value=name,
                expected="a name that is not in use",
                hint="Set replace (`loras load --replace`) to let the name mean the new file.",
            )
        self._loading[name] = entry
        self._entries.setdefault(name, entry)
        self._ask(entry, urgent=True)

    def unload(self, name: str) -> list[RegisteredAdapter]:
        """Forget a name at once.

        Returns:
            What it meant, and what it was to mean if a load was under way.

        Raises:
            UnknownAdapterError: if the name is not registered.
            InvalidRequestError: if it is the stage's default.
        """
        entry = self.get(name, "name")
        if any(name == one.name for one in self._default):
            raise InvalidRequestError(
                f"adapter {name!r} is the stage's default_lora",
                field="name",
                value=name,
                expected="another adapter",
                hint="Requests that name no adapter depend on it; it can be replaced.",
            )
        del self._entries[name]
        meant = list(dict.fromkeys([entry, self._loading.pop(name, entry)]))
        for one in meant:
            self._withdraw(one)
        self._unsettled.discard(entry)
        self.contents.remove(entry)
        return meant

    def pin(self, entry: RegisteredAdapter, pin: bool) -> None:
        """Let workers always keep an adapter on the device, or no longer."""
        self.contents.remove(entry)
        entry.pin = pin
        self.contents.add(entry)

    def num_pinned_beside(self, name: str) -> int:
        """Return how many places on a device pinned adapters take, another of ``name`` aside."""
        meant = {**self._entries, **self._loading}
        return len({e.digest or n for n, e in meant.items() if e.pin and n != name})

    def num_loading_for(self, client: Hashable) -> int:
        """Return how many loads that a client asked for are not answered yet."""
        return sum(entry.asked_by == client for entry in self._loading.values())

    # -- inside

    def _look_at(self, entry: RegisteredAdapter) -> None:
        """Ask for a check if the file is not the one seen last."""
        found = file_state(entry.path)
        if found == entry.seen:
            return
        if entry.check is not None:
            entry.changed = True
            return
        entry.seen = found
        entry.error = entry.find_unreadable()
        if entry.error is None:
            self._ask(entry, urgent=True)

    def _ask(self, entry: RegisteredAdapter, *, urgent: bool = False, repeats: int = 0) -> None:
        entry.seen, entry.changed = file_state(entry.path), False
        entry.check = self.checks.ask(entry.name, entry.path, urgent=urgent, repeats=repeats)
        self._checked[entry.check.check_id] = entry

    def _withdraw(self, entry: RegisteredAdapter) -> None:
        if entry.check is not None:
            self.checks.withdraw(entry.check)
            del self._checked[entry.check.check_id]
            entry.check = None

    def _take(self, entry: RegisteredAdapter, report: AdapterReport) -> str | None:
        """Put a content in force; returns the one that was before."""
        before = self._entries[entry.name]
        self.contents.remove(before)
        retired = before.digest
        if self._loading.get(entry.name) is entry:
            del self._loading[entry.name]
            self._entries[entry.name] = entry
            self._withdraw(before)
            self._unsettled.discard(before)
        entry.put_in_force(report)
        self.contents.add(entry)
        return retired

    def _refuse(self, entry: RegisteredAdapter, error: OmniError) -> None:
        current = self._entries[entry.name]
        if self._loading.get(entry.name) is not entry:
            entry.error = error
            return
        del self._loading[entry.name]
        if current is entry:
            del self._entries[entry.name]
        else:
            current.error = error
