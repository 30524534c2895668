"""Which worker suits which batch: where its adapters are active, else where they are held."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from omni_engine.engine.batching import Weights, WorkerSlot


class Need(NamedTuple):
    """What a batch, or a request, runs under: its identity, and the digests it needs loaded."""

    adapter: Hashable | None
    weights: Weights

    @property
    def is_base(self) -> bool:
        """Whether it runs on the base model, and so at little cost on any worker."""
        return self.adapter is None and not self.weights


def affinity(slot: WorkerSlot, need: Need) -> tuple[int, int]:
    """Rank how well a worker suits, the best lowest.

    First where the identity is active, then where all the weights are held, then by how many are.
    """
    if is_active(slot, need):
        return (0, 0)
    if need.weights and need.weights <= slot.held_adapters:
        return (1, 0)
    return (2, -len(need.weights & slot.held_adapters))


def is_active(slot: WorkerSlot, need: Need) -> bool:
    """Whether the worker's last batch ran under the same; mixed batches have no identity."""
    return slot.active_adapter == need.adapter and (need.adapter is not None or not need.weights)


def claim(slots: list[WorkerSlot], need: Need) -> None:
    """Strike out the worker that a picked batch suits, so that no other batch counts on it.

    The base model only strikes out that nothing is active there: another worker may serve it, too.
    """
    if len(slots) == 1:
        return  # this is the last batch
    for number, slot in enumerate(slots):
        if is_active(slot, need):
            if need.is_base:
                slots[number] = replace(slot, active_adapter=_TAKEN)
            else:
                del slots[number]
            return
    for number, slot in enumerate(slots):
        if need.weights and need.weights <= slot.held_adapters:
            del slots[number]
            return


def place(needs: Sequence[Need], slots: Sequence[WorkerSlot]) -> list[WorkerSlot]:
    """Give each batch a worker of its own, avoiding loads and switches of adapters.

    A worker is never taken from a batch that it suits better. The base model's batches choose
    last. Equals are served in order, each where fewest others would like to be.

    Args:
        needs: what the batches run under.
        slots: the idle workers, at least as many.

    Returns:
        One slot per batch, in the batches' order.
    """
    if len(slots) == 1:
        return list(slots[: len(needs)])
    ranks = [[affinity(slot, need) for need in needs] for slot in slots]
    wanted = [sum(rank < (2, 0) for rank in of_slot) for of_slot in ranks]
    pairs = sorted(
        (need.is_base, ranks[slot][batch], batch, wanted[slot], slot)
        for batch, need in enumerate(needs)
        for slot in range(len(slots))
    )
    placed: dict[int, WorkerSlot] = {}
    taken: set[int] = set()
    for _, _, batch, _, slot in pairs:
        if batch not in placed and slot not in taken:
            placed[batch] = slots[slot]
            taken.add(slot)
    return [placed[batch] for batch in range(len(needs))]


_TAKEN = object()  # equals no identity
