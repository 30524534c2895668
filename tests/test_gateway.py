"""The HTTP gateway as a process: it starts, comes back, ends with its engine, and keeps its keys."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import PATTERN
from http_server import COMMAND, HttpServer, http_server
from waiting import wait_for

ENGINE = ("--pipeline", PATTERN, "--name", "pattern", "--max-num-seqs", "4")


def get(url: str, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_it_serves() -> None:
    with http_server(*ENGINE) as server:
        status, models = get(f"{server.url}/v1/models")
        assert (status, [model["id"] for model in models["data"]]) == (200, ["pattern"])
