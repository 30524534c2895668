"""The adapter registry, its checks and its limits, driven without workers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from omni_engine.engine.adapter_checks import MAX_OUTSTANDING, MAX_TRIES, Check, CheckQueue
from omni_engine.engine.adapter_files import allowed_file
from omni_engine.engine.adapter_prefetch import RETELL_S, Prefetch, WorkerLoad
from omni_engine.engine.adapter_room import AdapterRoom
from omni_engine.engine.adapters import AdapterRegistry
from omni_engine.engine.registered_adapter import RegisteredAdapter, Settled
from omni_engine.protocol.adapters import Adapter, AdapterReport, AdaptersHeld, compose
from omni_engine.protocol.errors import (
    AdapterError,
    InvalidRequestError,
    LimitExceededError,
    OmniError,
    UnknownAdapterError,
)
from omni_engine.protocol.messages import LOAD_LORA, client_message, parse_client_message
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.sampling import LoRARequest, OmniDiffusionSamplingParams
from omni_engine.stages.config import ConfigFileError, EngineArgs
from omni_engine.stages.settings import load_settings

A, B = LoRARequest("a"), LoRARequest("b")


def report(digest: str) -> AdapterReport:
    return AdapterReport(digest, "peft", {"transformer": 2}, [4], ["to_q"], 100)


class Files:
    """Adapter files, as far as the engine looks at them: it never reads one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, text: str = "") -> str:
        """Put a file where it is, as programs do that never show half a file."""
        path = self.folder / f"{name}.safetensors"
        new = path.with_suffix(".new")
        new.write_text(text)
        new.replace(path)
        return str(path)

    def registry(self, *names: str, **arguments: Any) -> AdapterRegistry:
        modules = [{"name": name, "path": self.write(name)} for name in names]
        return AdapterRegistry(EngineArgs(model="m", lora_modules=modules, **arguments))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def given(registry: AdapterRegistry, *workers: str) -> list[Check]:
    return [check for _, check in registry.checks.give(workers or ("w",))]


def verdict(
    registry: AdapterRegistry, check: Check, digest: str | None = None, worker: str = "w"
) -> Settled:
    """A worker's answer: the content's digest, or that the file is broken."""
    assert registry.checks.answered(worker, check.check_id) is check
    if digest is None:
        return registry.settle(check, None, AdapterError(f"{check.name} is broken"))
    return registry.settle(check, report(digest), None)


def ready(registry: AdapterRegistry, **digests: str) -> AdapterRegistry:
    for check in given(registry):
        verdict(registry, check, digests[check.name])
    return registry


def identity(registry: AdapterRegistry, *asked: LoRARequest) -> Any:
    activation = registry.resolve(asked)
    return None if activation is None else activation.identity


# -- what a name means


def test_a_configured_adapter_is_checked_before_it_counts(files: Files) -> None:
    registry = files.registry("a")
    assert not registry.settled
    assert registry.awaiting([A]) == {"a"}
    (check,) = given(registry)
    assert check.to_wire() == {
        "type": "adapter_check",
        "check_id": check.check_id,
        "name": "a",
        "path": str(files.folder / "a.safetensors"),
    }
    assert verdict(registry, check, "d1") == Settled(registry.get("a"))
    assert registry.settled
    assert registry.awaiting([A]) == frozenset()
    assert identity(registry, A) == (("d1", 1.0),)
    assert not given(registry), "nothing is checked twice"


def test_a_broken_adapter_is_refused_until_its_file_changes(files: Files) -> None:
    registry = files.registry("a", "b")
    a, b = given(registry)
    assert str(verdict(registry, a).error) == "a is broken"
    verdict(registry, b, "d2")
    assert registry.settled
    assert (registry.get("a").state, registry.get("b").state) == ("broken", "ready")
    assert registry.awaiting([A, B]) == frozenset()
    with pytest.raises(AdapterError, match="a is broken"):
        registry.resolve([B, A])
    files.write("a", "mended")
    assert registry.awaiting([A, B]) == {"a"}
    verdict(registry, *given(registry), "d1")
    assert identity(registry, B, A) == (("d1", 1.0), ("d2", 1.0))


def test_a_file_that_changes_waits_for_its_check_and_gets_a_new_identity(files: Files) -> None:
    registry = ready(files.registry("a"), a="d1")
    files.write("a", "other")
    assert registry.awaiting([A]) == {"a"}
    assert registry.awaiting([A]) == {"a"}
    assert registry.get("a").state == "checking"
    assert identity(registry, A) == (("d1", 1.0),), "the old content is in force"
    (check,) = given(registry)
    assert verdict(registry, check, "d2").retired == "d1"
    assert identity(registry, A) == (("d2", 1.0),)
    assert "d1" not in registry.contents


def test_a_copy_of_equal_size_that_keeps_its_time_is_noticed(files: Files) -> None:
    registry = ready(files.registry("a"), a="d1")
    path = files.folder / "a.safetensors"
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # clocks of files are coarse
        path.write_text("")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert registry.awaiting([A]) == {"a"}


def test_a_broken_new_content_leaves_the_old_one_in_force(files: Files) -> None:
    registry = ready(files.registry("a"), a="d1")
    files.write("a", "half a file")
    registry.awaiting([A])
    verdict(registry, *given(registry))
    entry = registry.get("a")
    assert (entry.state, entry.digest, str(entry.error)) == ("ready", "d1", "a is broken")
    assert registry.awaiting([A]) == frozenset()
    assert identity(registry, A) == (("d1", 1.0),)
    files.write("a", "a whole one")
    registry.awaiting([A])
    verdict(registry, *given(registry), "d2")
    assert registry.get("a").error is None


def test_a_deleted_file_harms_nobody_and_may_come_back(files: Files) -> None:
    registry = ready(files.registry("a"), a="d1")
    path = Path(registry.get("a").path)
    path.unlink()
    assert registry.awaiting([A]) == frozenset()
    assert identity(registry, A) == (("d1", 1.0),)
    assert "there is no file" in str(registry.get("a").error)
    os.mkfifo(path)
    assert registry.awaiting([A]) == frozenset(), "a pipe is not opened"
    path.unlink()
    files.write("a")
    assert registry.awaiting([A]) == {"a"}
    verdict(registry, *given(registry), "d1")
    assert registry.get("a").error is None


def test_a_file_that_changes_while_it_is_checked_is_checked_again(files: Files) -> None:
    registry = ready(files.registry("a"), a="d1")
    files.write("a", "second")
    registry.awaiting([A])
    (check,) = given(registry)
    files.write("a", "the third")
    assert registry.awaiting([A]) == {"a"}
    settled = verdict(registry, check, "d2")
    assert (settled.done, settled.open) == (False, True)
    assert identity(registry, A) == (("d1", 1.0),)
    (again,) = given(registry)
    settled = verdict(registry, again, "d3")
    assert (settled.done, settled.open) == (True, False)
    assert identity(registry, A) == (("d3", 1.0),)


def test_a_file_that_never_stops_changing_holds_nobody_up_for_ever(files: Files) -> None:
    registry = ready(files.registry("a"), a="d")
    for turn in range(20):
        files.write("a", "x" * turn)
        registry.awaiting([A])
        (check,) = given(registry)
        files.write("a", "y" * turn)
        registry.awaiting([A])
        if verdict(registry, check, f"d{turn}").done:
            break
    assert turn < 5
    assert registry.awaiting([A], look=False) == frozenset()


def test_a_request_that_waited_is_not_held_up_by_the_next_change(files: Files) -> None:
    registry = ready(files.registry("a"), a="d1")
    files.write("a", "new")
    assert registry.awaiting([A]) == {"a"}
    assert registry.awaiting([A], look=False) == frozenset(), "something is in force"
    fresh = files.registry("b")
    assert fresh.awaiting([B], look=False) == {"b"}, "nothing is"


def test_the_default_adapter_applies_unless_an_empty_list_is_given(files: Files) -> None:
    registry = files.registry("a", default_lora={"name": "a", "scale": 0.5})
    assert registry.awaiting(None) == {"a"}
    assert registry.awaiting([]) == frozenset()
    ready(registry, a="d1")
    default = registry.resolve(None)
    assert default is not None
    assert default.identity == (("d1", 0.5),)
    assert registry.resolve([]) is None
    assert OmniDiffusionSamplingParams(lora_request=[]).lora_requests == ()
    assert OmniDiffusionSamplingParams().lora_requests is None


def test_an_unknown_name_is_refused_with_the_nearest(files: Files) -> None:
    registry = ready(files.registry("night", "outline"), night="d1", outline="d2")
    for ask in (registry.awaiting, registry.resolve):
        with pytest.raises(UnknownAdapterError, match="Did you mean 'night'") as caught:
            ask([LoRARequest("nigth")])
        assert caught.value.expected == "one of night, outline"
    many = files.registry(*(f"n{i}" for i in range(30)))
    with pytest.raises(UnknownAdapterError, match="and 10 more"):
        many.resolve([A])


# -- compositions


@pytest.mark.parametrize(
    ("given", "wire"),
    [
        (A, {"name": "a", "scale": None}),
        ({"name": "a", "scale": 0.123456}, {"name": "a", "scale": 0.1235}),
        ([A, {"name": "b", "scale": 2}], [{"name": "a", "scale": None}, {"name": "b", "scale": 2}]),
        ((A, A), [{"name": "a", "scale": None}] * 2),
        ([], []),
    ],
)
def test_one_adapter_or_a_list_of_them_on_the_wire(given: Any, wire: Any) -> None:
    params = OmniDiffusionSamplingParams(lora_request=given)
    assert params.to_wire() == {"lora_request": wire}
    assert OmniDiffusionSamplingParams.from_mapping({"lora_request": wire}) == params
    assert params.with_defaults({"height": 8}).lora_request == params.lora_request


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("a", "lora_request"),
        ([["a"]], "lora_request"),
        ([A] * 17, "lora_request"),
        ([A, {"scale": 1}], "lora_request.name"),
        ([{"name": "a", "scal": 1}], "lora_request.scal"),
        ([{"name": "a", "scale": 101}], "lora_request.scale"),
    ],
)
def test_what_names_no_adapters_is_refused(given: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        OmniDiffusionSamplingParams(lora_request=given)
    assert caught.value.field == field


def test_compositions_are_canonical(files: Files) -> None:
    registry = ready(files.registry("a", "b", "c"), a="d2", b="d1", c="d2")
    half = LoRARequest("a", 0.5)
    assert identity(registry, half, B) == identity(registry, B, half) == (("d1", 1.0), ("d2", 0.5))
    assert identity(registry, half, half) == (("d2", 1.0),)
    assert identity(registry, half, LoRARequest("c", 0.25)) == (("d2", 0.75),), "one content"
    assert identity(registry, half, LoRARequest("a", -0.5)) is None
    assert identity(registry, LoRARequest("a", 0), B) == (("d1", 1.0),)


def test_a_content_is_called_what_the_request_called_it_first(files: Files) -> None:
    registry = ready(files.registry("a", "b"), a="d", b="d")
    for asked, name in (([A, B], "a"), ([B, A], "b")):
        activation = registry.resolve(asked)
        assert activation is not None
        assert [adapter.name for adapter in activation.adapters] == [name]


@pytest.mark.parametrize(
    ("scales", "refused"), [((60, 50), "110"), ((-99, -2), "-101"), ((60, 40), None)]
)
def test_scales_that_come_to_too_much_are_refused(
    files: Files, scales: tuple[float, float], refused: str | None
) -> None:
    registry = ready(files.registry("a", "b"), a="d", b="d")
    asked = [LoRARequest(name, scale) for name, scale in zip("ab", scales, strict=True)]
    room, activation = AdapterRoom(8, None), registry.resolve(asked)
    if refused is None:
        room.check(activation, ())
    else:
        with pytest.raises(InvalidRequestError, match=f"come to {refused} together") as caught:
            room.check(activation, ())
        assert caught.value.field == "lora_request.scale"


@pytest.mark.parametrize(
    ("mixed", "pinned", "number", "refused"),
    [
        (None, (), 4, None),
        (None, (), 5, "needs 5 adapters at once.*at most 4 .max_loras = 4"),
        (None, ("d0",), 4, None),
        (None, ("x",), 4, "needs 4 adapters at once.*at most 3 .max_loras = 4, less 1 pinned"),
        (2, (), 2, None),
        (2, (), 3, "needs 3 adapters at once.*at most 2 .max_mixed_adapters"),
    ],
)
def test_more_adapters_than_fit_are_refused(
    mixed: int | None, pinned: tuple[str, ...], number: int, refused: str | None
) -> None:
    activation = compose((Adapter(f"n{i}", "", f"d{i}"), 1.0) for i in range(number))
    room = AdapterRoom(4, mixed)
    if refused is None:
        room.check(activation, pinned)
    else:
        with pytest.raises(LimitExceededError, match=refused):
            room.check(activation, pinned)


def test_room_for_mixing_counts_only_where_the_pipeline_mixes() -> None:
    arguments = EngineArgs(model="m", max_loras=8, mixed_lora=True, max_mixed_adapters=3)
    can, can_not = (PipelineCapabilities("P", mixes_adapters=mixes) for mixes in (True, False))
    assert AdapterRoom.of(arguments, can).mixed == 3
    assert AdapterRoom.of(arguments, can_not).mixed is None
    assert AdapterRoom.of(EngineArgs(model="m"), can).mixed is None


# -- checks


def test_checks_are_spread_and_few_are_outstanding() -> None:
    queue = CheckQueue()
    checks = [queue.ask(f"n{i}", "") for i in range(20)]
    first = queue.give(["w1", "w2"])
    assert [check for _, check in first] == checks[: 2 * MAX_OUTSTANDING]
    assert [worker for worker, _ in first].count("w1") == MAX_OUTSTANDING
    assert queue.give(["w1", "w2"]) == []
    assert queue.answered("w2", first[1][1].check_id) is first[1][1]
    assert queue.answered("w2", first[1][1].check_id) is None, "it was answered"
    assert [worker for worker, _ in queue.give(["w1", "w2"])] == ["w2"]
    assert queue.give([]) == []


def test_checks_that_somebody_waits_for_go_first_in_their_order() -> None:
    queue = CheckQueue()
    checks = [queue.ask(f"n{i}", "") for i in range(3)]
    urgent = queue.ask("u", "", urgent=True)
    queue.hurry(checks[2])
    queue.withdraw(checks[0])
    assert [check for _, check in queue.give(["w"])] == [urgent, checks[2], checks[1]]


def test_checks_of_a_lost_worker_go_to_another_but_not_for_ever() -> None:
    queue = CheckQueue()
    checks = [queue.ask(f"n{i}", "") for i in range(3)]
    for number in range(MAX_TRIES):
        worker = f"w{number}"
        assert [check for _, check in queue.give([worker])] == checks
        lost = queue.lose(worker)
        assert lost == ([] if number + 1 < MAX_TRIES else checks)
    assert len(queue) == 0


def test_where_nobody_can_check_every_adapter_gets_the_reason(files: Files) -> None:
    registry = files.registry("a", "b")
    registry.checks.give(["w"])
    why = OmniError("no worker is left")
    assert {one.entry.name for one in registry.refuse_checks(why)} == {"a", "b"}
    assert registry.settled
    with pytest.raises(OmniError, match="no worker is left"):
        registry.resolve([A])


def test_a_pipeline_without_adapters_checks_none(files: Files) -> None:
    registry = files.registry("a")
    registry.give_up(OmniError("P takes no adapters"))
    files.write("a", "changed")
    assert registry.awaiting([A]) == frozenset()
    for call in (
        lambda: registry.resolve([A]),
        lambda: registry.load(RegisteredAdapter("b", files.write("b")), replace=False),
    ):
        with pytest.raises(OmniError, match="takes no adapters"):
            call()


# -- management


def loaded(registry: AdapterRegistry, files: Files, name: str, **fields: Any) -> RegisteredAdapter:
    return RegisteredAdapter(name, files.write(name), **fields)


def test_a_new_name_is_nobodys_until_its_file_is_found_good(files: Files) -> None:
    registry = files.registry()
    registry.load(loaded(registry, files, "a"), replace=False)
    assert registry.names == ()
    assert registry.awaiting([A]) == {"a"}, "requests that name it wait"
    with pytest.raises(InvalidRequestError, match="being loaded already"):
        registry.load(loaded(registry, files, "a"), replace=True)
    verdict(registry, *given(registry), "d1")
    assert registry.names == ("a",)
    assert identity(registry, A) == (("d1", 1.0),)


def test_a_broken_file_registers_nothing(files: Files) -> None:
    registry = files.registry()
    registry.load(loaded(registry, files, "a"), replace=False)
    settled = verdict(registry, *given(registry))
    assert (settled.open, str(settled.error)) == (False, "a is broken")
    with pytest.raises(UnknownAdapterError):
        registry.awaiting([A])
    registry.load(loaded(registry, files, "a"), replace=False)


def test_a_name_in_use_is_replaced_only_on_demand_and_once_the_new_file_is_good(
    files: Files,
) -> None:
    registry = ready(files.registry("a", "b"), a="d1", b="d2")
    other = RegisteredAdapter("a", files.write("other"), default_scale=0.5)
    with pytest.raises(InvalidRequestError, match=r"registered already.*Set replace"):
        registry.load(other, replace=False)
    registry.load(other, replace=True)
    assert registry.awaiting([A]) == frozenset(), "what is in force holds nobody up"
    assert identity(registry, A) == (("d1", 1.0),)
    settled = verdict(registry, *given(registry), "d3")
    assert (settled.retired, settled.entry) == ("d1", other)
    assert identity(registry, A) == (("d3", 0.5),)
    assert registry.names == ("a", "b")


def test_a_broken_replacement_shows_and_changes_nothing(files: Files) -> None:
    registry = ready(files.registry("a"), a="d1")
    registry.load(RegisteredAdapter("a", files.write("other")), replace=True)
    settled = verdict(registry, *given(registry))
    assert settled.retired is None
    entry = registry.get("a")
    assert entry.path == str(files.folder / "a.safetensors")
    assert (entry.state, entry.digest, str(entry.error)) == ("ready", "d1", "a is broken")


def test_a_replacement_settles_a_name_whose_own_file_is_being_checked(files: Files) -> None:
    registry = files.registry("a")
    (own,) = given(registry)
    registry.load(RegisteredAdapter("a", files.write("other")), replace=True)
    (new,) = given(registry)
    assert registry.awaiting([A]) == {"a"}
    assert not verdict(registry, new, "d2").open
    assert registry.settled
    assert identity(registry, A) == (("d2", 1.0),)
    assert registry.checks.answered("w", own.check_id) is None, "its verdict counts no more"


def test_a_broken_replacement_lets_requests_wait_on_for_the_names_own_file(files: Files) -> None:
    registry = files.registry("a")
    (own,) = given(registry)
    registry.load(RegisteredAdapter("a", files.write("other")), replace=True)
    assert verdict(registry, *given(registry)).open
    assert not verdict(registry, own, "d1").open
    assert registry.get("a").error is None


def test_unloading_forgets_a_name_at_once_and_withdraws_its_checks(files: Files) -> None:
    registry = ready(files.registry("a", "b"), a="d1", b="d1")
    files.write("a", "changed")
    registry.awaiting([A])
    (own,) = given(registry)
    replacement = RegisteredAdapter("a", files.write("other"))
    registry.load(replacement, replace=True)
    (new,) = given(registry)
    entry = registry.get("a")
    assert registry.unload("a") == [entry, replacement]
    assert [registry.checks.answered("w", check.check_id) for check in (own, new)] == [None, None]
    assert len(registry.checks) == 0
    for call in (registry.awaiting, registry.resolve):
        with pytest.raises(UnknownAdapterError):
            call([A])
    with pytest.raises(UnknownAdapterError):
        registry.unload("a")
    assert "d1" in registry.contents, "the other name means it, too"
    registry.unload("b")
    assert "d1" not in registry.contents


def test_the_default_adapter_can_not_be_unloaded(files: Files) -> None:
    registry = ready(files.registry("a", default_lora={"name": "a"}), a="d1")
    with pytest.raises(InvalidRequestError, match="default_lora"):
        registry.unload("a")
    assert identity(registry, A) == (("d1", 1.0),)


def test_pins_are_counted_by_content(files: Files) -> None:
    registry = ready(files.registry("a", "b", "c"), a="d1", b="d1", c="d2")
    for name in "abc":
        registry.pin(registry.get(name), True)
    assert registry.contents.pinned == {"d1", "d2"}
    assert registry.num_pinned_beside("x") == 2
    assert registry.num_pinned_beside("c") == 1
    registry.pin(registry.get("a"), False)
    assert registry.contents.pinned == {"d1", "d2"}
    registry.unload("b")
    assert registry.contents.pinned == {"d2"}
    registry.load(loaded(registry, files, "d", pin=True), replace=False)
    assert registry.num_pinned_beside("x") == 2, "what is being loaded counts"
    verdict(registry, *given(registry), "d3")
    assert registry.contents.pinned == {"d2", "d3"}


def test_pins_leave_room_for_what_runs_beside_them() -> None:
    with pytest.raises(LimitExceededError, match="3 would be, and 2 of 4 places must stay free"):
        AdapterRoom(4, 2).check_pins("a", 3, in_use=1)
    AdapterRoom(4, 2).check_pins("a", 2, in_use=1)
    with pytest.raises(LimitExceededError, match="3 of 4 places"):
        AdapterRoom(4, None).check_pins("a", 2, in_use=3)
    AdapterRoom(4, None).check_pins("a", 3, in_use=0)


# -- files of clients


@pytest.fixture
def dirs(tmp_path: Path) -> list[Path]:
    """Two folders for adapters beside one that is not."""
    folders = [tmp_path / name for name in ("one", "two", "outside")]
    for folder in folders:
        folder.mkdir()
        (folder / f"{folder.name}.safetensors").touch()
        (folder / "both.safetensors").touch()
    return folders


def meant(path: str | Path, dirs: list[Path], model: str = "m") -> str:
    arguments = EngineArgs(model=model, lora_dirs=[str(folder) for folder in dirs[:2]])
    return allowed_file(str(path), arguments)


def test_paths_are_looked_for_in_each_folder_in_order(dirs: list[Path]) -> None:
    one, two, _ = dirs
    assert meant("two.safetensors", dirs) == str(two / "two.safetensors")
    assert meant("both.safetensors", dirs) == str(one / "both.safetensors")
    assert meant(two / "both.safetensors", dirs) == str(two / "both.safetensors")
    inner = one / "folder"
    inner.mkdir()
    shutil.copy(one / "one.safetensors", inner / "x.safetensors")
    assert meant("folder", dirs) == str(inner / "x.safetensors")
    (one / "blob").touch()
    (one / "link.safetensors").symlink_to("blob")
    assert meant("link.safetensors", dirs) == str(one / "blob"), "as the hub's cache has it"


@pytest.mark.parametrize(
    "path",
    ["../outside/outside.safetensors", "/dev/zero", "/nowhere.safetensors", "OUTSIDE",
     "out.safetensors", "away/outside.safetensors", "away", "tricky", "../one/../outside",
     "../onelike.safetensors", "~/x.safetensors/../../../outside"],
)  # fmt: skip
def test_paths_that_lead_out_of_the_folders_are_refused(dirs: list[Path], path: str) -> None:
    one, _, outside = dirs
    target = outside / "outside.safetensors"
    (one / "out.safetensors").symlink_to(target)
    (one / "away").symlink_to(outside)
    (one / "tricky").mkdir()
    (one / "tricky" / "inner.safetensors").symlink_to(target)
    (one.parent / "onelike.safetensors").touch()
    with pytest.raises(InvalidRequestError, match="lora_dirs only, and the path leads elsewhere"):
        meant(path.replace("OUTSIDE", str(target)), dirs)


def test_files_whose_names_are_no_text_are_refused(dirs: list[Path]) -> None:
    (dirs[0] / "folder").mkdir()
    odd = dirs[0] / "folder" / os.fsdecode(b"\xff.safetensors")
    odd.touch()
    (dirs[0] / "link.safetensors").symlink_to(odd)
    for path in ("folder", "link.safetensors"):
        with pytest.raises(InvalidRequestError, match="not UTF-8"):
            meant(path, dirs)


def test_files_that_are_none_are_refused(dirs: list[Path]) -> None:
    (dirs[0] / "x.bin").touch()
    for path, why in (
        ("x.bin", "is not a safetensors file"),
        ("nowhere.safetensors", "there is no file"),
        ("", "holds 2 safetensors files"),
    ):
        with pytest.raises(InvalidRequestError, match=why) as caught:
            meant(path, dirs)
        assert caught.value.field == "path"
    with pytest.raises(InvalidRequestError, match="lora_dirs only, and this stage has none"):
        meant(dirs[0] / "one.safetensors", [])


def test_adapters_of_the_bundled_model_are_for_it_alone(dirs: list[Path]) -> None:
    assert meant("bundled:night", dirs, "bundled").endswith("night.safetensors")
    with pytest.raises(InvalidRequestError, match="for the bundled model"):
        meant("bundled:night", dirs)
    with pytest.raises(InvalidRequestError, match="did you mean bundled:night"):
        meant("bundled:nigth", dirs, "bundled")


def test_a_loaded_file_that_becomes_a_link_is_not_followed(files: Files, dirs: list[Path]) -> None:
    registry = files.registry()
    path = meant("one.safetensors", dirs)
    registry.load(RegisteredAdapter("a", path, confined=True), replace=False)
    verdict(registry, *given(registry), "d1")
    Path(path).unlink()
    Path(path).symlink_to(dirs[2] / "outside.safetensors")
    assert registry.awaiting([A]) == frozenset()
    assert not given(registry)
    assert "leads elsewhere now" in str(registry.get("a").error)
    assert identity(registry, A) == (("d1", 1.0),)


# -- loading ahead


class Ahead:
    """A ``Prefetch`` with two places per worker, and what it sends."""

    def __init__(self, places: int = 2) -> None:
        self.sent: list[tuple[str, list[str]]] = []
        self.prefetch = Prefetch(places, self._send)

    def _send(self, worker_id: str, message: dict[str, Any]) -> None:
        assert message["type"] == "adapter_prefetch"
        self.sent.append((worker_id, [Adapter(**wire).digest for wire in message["adapters"]]))

    def plan(self, *upcoming: str, now: float = 0.0, pinned: str = "", **running: str) -> Any:
        """What is sent for these next batches while workers run batches: a letter a content."""
        loads = [WorkerLoad(w, len(needed), frozenset(needed)) for w, needed in running.items()]
        self.sent.clear()
        ahead = [tuple(weights) for weights in upcoming]
        adapters = {digest: Adapter(digest, "", digest) for digest in "abcdefgh"}
        self.prefetch.plan(ahead, loads, frozenset(pinned), adapters.__getitem__, now)
        return list(self.sent)

    def held(self, worker_id: str, device: str = "", host: str = "") -> None:
        self.prefetch.note_held(worker_id, AdaptersHeld(list(device), list(host)))


def test_the_next_adapter_goes_to_the_least_loaded_worker_and_only_once() -> None:
    ahead = Ahead()
    assert ahead.plan("b", v="a", w="") == [("w", ["b"])]
    assert ahead.plan("b", v="a", w="") == [], "it was told"
    ahead.held("w", "b")
    assert ahead.plan("b", v="a", w="") == [], "it has it"
    assert ahead.plan("c", "d", v="a", w="b") == [("v", ["c"]), ("w", ["d"])]


def test_never_more_than_fits_beside_what_runs_what_is_pinned_and_what_comes_next() -> None:
    assert Ahead().plan("c", "d", v="a") == [("v", ["c"])]
    assert Ahead().plan("c", v="ab") == []
    assert Ahead().plan("c", v="a", pinned="b") == []
    ahead = Ahead()
    ahead.held("v", "ab")
    assert ahead.plan("b", "c", v="a") == [], "it would evict b, which is needed before"
    assert ahead.plan("c", "b", v="a") == [("v", ["c"])]


def test_a_composition_is_loaded_whole_where_most_of_it_is() -> None:
    ahead = Ahead(3)
    ahead.held("w", "b")
    assert ahead.plan("bc", v="", w="") == [("w", ["c"])]
    assert Ahead().plan("bcd", v="") == [], "it does not fit"
    ahead = Ahead()
    ahead.held("v", host="b")
    assert ahead.plan("b", v="a", w="") == [("v", ["b"])], "it is near there"


def test_a_worker_that_does_not_load_is_told_again_after_a_while() -> None:
    ahead = Ahead()
    assert ahead.plan("b", v="a") == [("v", ["b"])]
    ahead.held("v", "a")
    assert ahead.plan("b", v="a", now=RETELL_S / 2) == []
    assert ahead.plan("b", v="a", now=RETELL_S) == [("v", ["b"])]
    ahead.prefetch.forget("v")
    assert ahead.plan("b", v="a", now=RETELL_S) == [("v", ["b"])]


@pytest.mark.parametrize("name", ["x:1", "a=b", ":", "night:0.5"])
def test_names_that_the_command_line_could_take_for_something_else_are_refused(name: str) -> None:
    with pytest.raises(ConfigFileError, match="without ':'"):
        load_settings(overrides={"lora_modules": [{"name": name, "path": "bundled:night"}]})
    message = client_message(LOAD_LORA, 1, name=name, path="x.safetensors")
    with pytest.raises(InvalidRequestError, match="without ':'"):
        parse_client_message(message)
