"""The options of ``serve`` that concern HTTP."""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass
from typing import Annotated, Any

from omni_engine.cli.options import option
from omni_engine.protocol.errors import ConfigError

_http = functools.partial(option, "HTTP")

API_KEY_VARIABLE, ADMIN_KEY_VARIABLE = "OMNI_ENGINE_API_KEY", "OMNI_ENGINE_ADMIN_KEY"


@dataclass(frozen=True)
class HttpOptions:
    """Options of the HTTP gateway; None means not given. Fields are named like ``OVERRIDES``."""

    port: Annotated[
        int | None,
        _http("--port", "Serve HTTP, as OpenAI's clients speak it; 0 picks a free port.", "PORT"),
    ] = None
    host: Annotated[
        str | None, _http("--host", "Address to serve HTTP at. Default: 127.0.0.1.", "ADDRESS")
    ] = None
    api_key: Annotated[
        str | None,
        _http("--api-key", "Key that requests need. Others on the machine can see it here: "
              f"rather set {API_KEY_VARIABLE}.", "KEY"),
    ] = None  # fmt: skip
    admin_key: Annotated[
        str | None,
        _http("--admin-key", "Key that managing adapters needs; without one it is off. "
              f"Rather set {ADMIN_KEY_VARIABLE}.", "KEY"),
    ] = None  # fmt: skip
    cors_origins: Annotated[
        list[str] | None,
        _http("--cors-origins", "Origin whose pages may call the server; repeatable. "
              "Default: none.", "ORIGIN"),
    ] = None  # fmt: skip
    image_hosts: Annotated[
        list[str] | None,
        _http("--image-hosts", "Host from which pictures may be fetched; repeatable. "
              "Default: none.", "HOST"),
    ] = None  # fmt: skip
    max_body_bytes: Annotated[
        int | None, _http("--max-body-bytes", "Bytes of one HTTP request.", "BYTES")
    ] = None
    max_kept_bytes: Annotated[
        int | None, _http("--max-kept-bytes", "Bytes of results kept for download.", "BYTES")
    ] = None
    http_result_ttl_s: Annotated[
        float | None,
        _http("--http-result-ttl-s", "Seconds that a result is kept for download.", "S"),
    ] = None
    encoder_threads: Annotated[
        int | None, _http("--encoder-threads", "Threads that encode pictures and videos.", "N")
    ] = None

    def given(self) -> list[str]:
        """Return the flags that were given."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return [f"--{name.replace('_', '-')}" for name, value in values if value not in (None, [])]

    def overrides(self) -> dict[str, Any]:
        """Return the settings that were given, keys from the environment included.

        Raises:
            ConfigError: if a key in the environment is empty.
        """
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.api_key is None:
            given["api_key"] = _key_in(API_KEY_VARIABLE)
        if self.admin_key is None:
            given["admin_key"] = _key_in(ADMIN_KEY_VARIABLE)
        return {name: value for name, value in given.items() if value not in (None, [])}


def _key_in(variable: str) -> str | None:
    """Return a key from the environment; an empty one must not pass for none."""
    value = os.environ.get(variable)
    if value == "":
        raise ConfigError(
            f"{variable} is set, but empty", field=variable, hint="Unset it, or put a key in it."
        )
    return value
