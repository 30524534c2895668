"""Clients that mean no good, each a process: ``python -m hostile_clients KIND ENDPOINT``.

A line on standard output says that the attack is under way; the end of standard input ends it.
Then a line of JSON tells what came of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import zmq
from raw_client import Array, encode
from zmtp import LONG, MORE, connected, frame, greeted

MIB = 1 << 20
_over = threading.Event()
_under_way = threading.Event()


def _message(kind: str, message_id: int | None = None, **body: object) -> list[Any]:
    return encode({"v": 1, "type": kind, "id": message_id, **body})


@contextlib.contextmanager
def _dealer(endpoint: str, queue: int = 10) -> Iterator[zmq.Socket[bytes]]:
    """A socket that blocks when the engine takes no more; it leaves without a word."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, queue)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.SNDTIMEO, 200)
        socket.connect(endpoint)
        yield socket


def _repeat(endpoint: str, frames_of: Callable[[int], list[Any]], most: int = 10**9) -> int:
    """Send messages without reading any, as fast as the engine takes them; how many."""
    sent = 0
    with _dealer(endpoint) as socket:
        while not _over.is_set():
            if sent < most:
                with contextlib.suppress(zmq.Again):
                    socket.send_multipart(frames_of(sent), copy=False)
                    sent += 1
            else:
                _over.wait(0.1)
            if sent >= min(most, 3):
                _under_way.set()
    return sent


def reads_nothing(endpoint: str) -> object:
    """Submits requests and never reads an answer."""

    def requests(number: int) -> list[Any]:
        ids = [f"silent-{os.getpid()}-{number}-{i}" for i in range(20)]
        asked = [{"request_id": i, "prompt": "a", "sampling_params": {"seed": 1}} for i in ids]
        return _message("submit", requests=asked)

    return {"messages": _repeat(endpoint, requests)}


def huge_frame(endpoint: str) -> object:
    """Announces a header of 2 GB and streams zeros, again and again; the most that got through."""
    most, cut_off = 0, 0
    zeros = bytes(MIB)
    while not _over.is_set():
        sent = 0
        with connected(endpoint) as one:
            greeted(one)
            try:
                one.sendall(frame(b"", LONG, 2 * 10**9))
                while sent < 2 * 10**9 and not _over.is_set():
                    one.sendall(zeros)
                    sent += MIB
            except (ConnectionError, TimeoutError):
                cut_off += 1
        most = max(most, sent)
        if cut_off > 2:
            _under_way.set()
    return {"most_bytes": most, "cut_off": cut_off}


def endless_multipart(endpoint: str) -> object:
    """Sends frames of a message that never ends: 100 MiB in small frames, then it waits."""
    frames = frame(bytes(1000), MORE) * 1000
    sent = 0
    with connected(endpoint) as one:
        greeted(one)
        while sent < 100 * MIB and not _over.is_set():
            one.sendall(frames)
            sent += len(frames)
            if sent > MIB:
                _under_way.set()
        _over.wait()
    return {"bytes": sent}


def crowd(endpoint: str, count: str = "500") -> object:
    """Opens connections, says hello on each of them, and stays."""
    _raise_file_limit()
    with contextlib.ExitStack() as stack:
        for _ in range(int(count)):
            one = stack.enter_context(connected(endpoint))
            greeted(one)
            one.sendall(frame(_message("hello", 1)[0]))
        _under_way.set()
        _over.wait()
    return {"connections": int(count)}


def silent_crowd(endpoint: str) -> object:
    """Opens 1,100 connections that say nothing at all, not even a greeting, if it can."""
    _raise_file_limit()
    opened = failed = 0
    with contextlib.ExitStack() as stack:
        while opened < 1100 and failed < 200:
            try:
                stack.enter_context(connected(endpoint, timeout_s=0.5))
                opened += 1
            except (
                ConnectionError,
                TimeoutError,
                BlockingIOError,
            ):  # the queue to be let in is full
                failed += 1
                _over.wait(0.01)
        _under_way.set()
        _over.wait()
    return {"connections": opened}


def largest_messages(endpoint: str, size: str = str(256 * MIB)) -> object:
    """Submits messages as large as may be: a request with an array that is refused."""
    side = int(((int(size) - 1000) / 3) ** 0.5)
    picture = Array("uint8", (side, side, 3), bytes(side * side * 3))
    request = {"prompt": "a", "multi_modal_data": {"image": picture}}
    frames = _message("submit", requests=[request])
    return {"messages": _repeat(endpoint, lambda _: frames)}


def many_texts(endpoint: str, size: str) -> object:
    """Sends headers as large as may be, of lists of very short strings."""
    return _repeat_list(endpoint, (b"\xdc\x27\x10" + b"\xa2ab" * 10_000), int(size))


def many_containers(endpoint: str, size: str) -> object:
    """Sends headers as large as may be, full of empty lists."""
    return _repeat_list(endpoint, b"\x90", int(size))


def long_text(endpoint: str, size: str) -> object:
    """Submits prompts as long as a header may be, of characters of three bytes each."""
    request = {"prompt": "\u4e2d" * ((int(size) - 200) // 3)}
    frames = _message("submit", requests=[request])
    return {"messages": _repeat(endpoint, lambda _: frames)}


def _repeat_list(endpoint: str, item: bytes, size: int) -> object:
    """Send headers with a list of as many items as fit."""
    count = (size - 100) // len(item)
    header = b"\x84\xa1v\x01\xa4type\xa6status\xa2id\xc0\xa1x\xdd" + count.to_bytes(4, "big")
    frames = [header + item * count]
    return {"messages": _repeat(endpoint, lambda _: frames)}


def full_submits(endpoint: str, count: str) -> object:
    """Submits as many requests in one message as may be, all of them wrong."""
    request = {"prompt": "a", "sampling_params": {"heigth": 16}}
    frames = _message("submit", requests=[request] * int(count))
    return {"messages": _repeat(endpoint, lambda _: frames)}


def aborts(endpoint: str) -> object:
    """Aborts 100,000 times what doesn't exist."""
    frames = _message("abort", request_ids=["nothing"])
    return {"messages": _repeat(endpoint, lambda _: frames, 100_000)}


def statuses(endpoint: str) -> object:
    """Asks for the status 100,000 times and reads no answer."""
    frames = _message("status")
    return {"messages": _repeat(endpoint, lambda _: frames, 100_000)}


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _watch_owner() -> None:
    while not _over.is_set():
        if _under_way.wait(0.02):
            print("under way", flush=True)
            break
    sys.stdin.read()
    _over.set()


def main() -> None:
    """Run the attack that the command line names."""
    kind, endpoint, *options = sys.argv[1:]
    watch = threading.Thread(target=_watch_owner, daemon=True)
    watch.start()
    print(json.dumps(globals()[kind](endpoint, *options)), flush=True)


if __name__ == "__main__":
    main()
