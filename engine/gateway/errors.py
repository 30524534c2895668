"""Errors as OpenAI's clients know them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from omni_engine.protocol.errors import OmniError

STATUS_BY_CODE = {
    "config_error": 400,
    "unsupported_option": 400,
    "invalid_request": 400,
    "unknown_field": 400,
    "limit_exceeded": 400,
    "unknown_model": 404,
    "unknown_adapter": 404,
    "unknown_request": 404,
    "duplicate_request_id": 409,
    "aborted": 409,
    "adapter_unusable": 422,
    "message_too_large": 413,
    "queue_full": 429,
    "stage_unavailable": 503,
    "engine_closed": 503,
    "timeout": 504,
}
"""HTTP status by the error's code; every other code is a server error, 500."""

PARAM_BY_FIELD = {
    "height": "size",
    "width": "size",
    "num_outputs_per_prompt": "n",
    "lora_request": "lora",
    "lora_request.name": "lora.name",
    "lora_request.scale": "lora.scale",
    "height x width": "size",
    "num_outputs_per_prompt x height x width x num_frames": "size",
    "multi_modal_data": "image",
    "multi_modal_data.image": "image",
    "multi_modal_data.mask_image": "mask",
    "multi_modal_data.control_image": "control_image",
}
"""The HTTP field that sets an engine's field, where they differ."""

CLIENT_CLOSED_REQUEST = 499
"""The status, as others count it, of a request whose client left before the answer began."""

_INDEX = re.compile(r"\[\d+\]$")
"""Which of several pictures it is; the message says so."""

_TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


@dataclass(eq=False)
class GatewayError(Exception):
    """What the gateway itself refuses.

    Attributes:
        status: of the response.
        message: what is wrong and what to do, for people.
        param: the field at fault.
        code: stable, for programs.
        headers: for the response.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = "invalid_request"
    headers: dict[str, str] | None = None

    def response(self) -> JSONResponse:
        """Return the response that tells of it."""
        return _response(self.status, self.message, self.param, self.code, self.headers)

    def body(self) -> dict[str, Any]:
        """Return the response's body, which an event of a stream has, too."""
        return _body(self.status, self.message, self.param, self.code)


def from_engine(error: OmniError) -> GatewayError:
    """Return an engine's error as one of HTTP's."""
    param = None if error.field is None else param_of(error.field)
    parts = [error.message if error.message.endswith((".", "!", "?")) else f"{error.message}."]
    if error.value is not None:
        parts.append(f"Given: {error.value}.")
    if error.expected is not None:
        parts.append(f"Expected: {error.expected}.")
    if error.hint is not None:
        parts.append(error.hint)
    status = STATUS_BY_CODE.get(error.code, 500)
    return GatewayError(status, " ".join(parts), param, error.code, _retry_headers(error))


def param_of(field: str) -> str:
    """Return the HTTP field that sets an engine's field."""
    field = _INDEX.sub("", field.removeprefix("sampling_params."))
    return PARAM_BY_FIELD.get(field, field)


def _retry_headers(error: OmniError) -> dict[str, str] | None:
    if error.retry_after_ms is None:
        return None
    seconds = max(1, math.ceil(error.retry_after_ms / 1000))
    return {"Retry-After": str(seconds), "retry-after-ms": f"{error.retry_after_ms:.0f}"}


def _body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kind = _TYPE_BY_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    named = None if param is None else _sendable(param)
    return {"error": {"message": _sendable(message), "type": kind, "param": named, "code": code}}


def _sendable(text: str) -> str:
    """Return a text without what JSON may hold and UTF-8 may not: halves of characters."""
    return text.encode("utf-8", "backslashreplace").decode()


def _response(
    status: int,
    message: str,
    param: str | None,
    code: str | None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    return JSONResponse(_body(status, message, param, code), status, headers)


def install(app: FastAPI) -> None:
    """Answer every error in OpenAI's shape."""
    app.add_exception_handler(GatewayError, _on_gateway_error)
    app.add_exception_handler(OmniError, _on_engine_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_surprise)


async def _on_gateway_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GatewayError)
    return error.response()


async def _on_engine_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, OmniError)
    return from_engine(error).response()


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    from omni_engine.engine.gateway.validation import refusal_of  # it needs GatewayError

    assert isinstance(error, RequestValidationError)
    return refusal_of(error.errors()).response()


def client_gone() -> GatewayError:
    """Return what becomes of a request whose client has left: nobody reads it, but it counts."""
    return GatewayError(CLIENT_CLOSED_REQUEST, "The client has gone.", code="client_gone")


async def _on_disconnect(request: Request, error: Exception) -> JSONResponse:
    """End a request whose client left in the middle of its body."""
    return client_gone().response()


async def _on_surprise(request: Request, error: Exception) -> JSONResponse:
    """Tell that the server failed; what happened is in its log, not in the answer."""
    return _response(500, "The server failed; its log tells more.", None, "internal_error")


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    message = {
        404: f"There is nothing at {request.method} {request.url.path}.",
        405: f"{request.url.path} does not take {request.method}.",
    }.get(error.status_code, str(error.detail))
    headers = dict(error.headers) if error.headers else None
    code = codes.get(error.status_code, "invalid_request")
    return _response(error.status_code, message, None, code, headers)
