"""What routes tell of themselves in the OpenAPI document, where FastAPI can't see it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from omni_engine.engine.gateway.validation import Body


class ErrorDetails(BaseModel):
    """What went wrong, as OpenAI's clients know it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorDetails


_MEANINGS = {
    400: "A field is wrong; `param` names it.",
    401: "The key is missing or wrong.",
    403: "That is not allowed.",
    404: "There is no such thing.",
    409: "It clashes with another request, or was aborted.",
    413: "The body is too large.",
    415: "The body's Content-Type is another one.",
    416: "There is no such part.",
    422: "The adapter can't be used.",
    429: "The queue is full; try again after `Retry-After`.",
    500: "The model or the server failed.",
    503: "The model or the engine is not there (yet).",
    504: "The request's time was up.",
}
_OF_REQUESTS = (400, 401, 403, 404, 409, 413, 415, 422, 429, 500, 503, 504)


def errors_of(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the answers of a route that are no success, for its ``responses``."""
    return {status: {"model": ErrorAnswer, "description": _MEANINGS[status]} for status in statuses}


def errors_of_requests() -> dict[int | str, dict[str, Any]]:
    """Return what a route that runs a model may answer instead of its result."""
    return errors_of(*_OF_REQUESTS)


def takes_json(model: type[Body]) -> dict[str, Any]:
    """Return a route's ``openapi_extra``: its body is this model, in JSON."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": model.schema_for_openapi()}},
        }
    }


def takes_form(model: type[Body], pictures: dict[str, str], required: list[str]) -> dict[str, Any]:
    """Return a route's ``openapi_extra``: its body is a form.

    Args:
        model: the text fields.
        pictures: the fields for pictures, and what they are.
        required: those of them that must be there.
    """
    schema = model.schema_for_openapi()
    files = {
        name: {"type": "string", "format": "binary", "description": text}
        for name, text in pictures.items()
    }
    schema["properties"] = {**files, **schema["properties"]}
    schema["required"] = [*required, *schema.get("required", [])]
    return {
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    }


def event_stream(model: type[BaseModel], description: str) -> dict[int | str, dict[str, Any]]:
    """Return a success that is JSON or, when asked for, server-sent events."""
    return {
        200: {
            "model": model,
            "description": description,
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    }


def install(app: FastAPI) -> None:
    """Let the application's document say how errors look here, instead of how FastAPI's do."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title, version=app.version, summary=app.summary, routes=app.routes
            )
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            schemas["ErrorAnswer"] = ErrorAnswer.model_json_schema(ref_template=_IN_COMPONENTS)
            schemas.update(schemas["ErrorAnswer"].pop("$defs"))
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            for methods in made["paths"].values():
                for route in methods.values():
                    _correct(route["responses"])
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


_IN_COMPONENTS = "#/components/schemas/{model}"


def _correct(responses: dict[str, Any]) -> None:
    """Remove FastAPI's own shape of errors, and say which shape they have: JSON, everywhere."""
    content = responses.get("422", {}).get("content", {}).get("application/json", {})
    if content.get("schema", {}).get("$ref", "").endswith("/HTTPValidationError"):
        del responses["422"]
    for status, answer in responses.items():
        if status[0] in "45" and "text/plain" in answer.get("content", {}):
            answer["content"] = {"application/json": answer["content"]["text/plain"]}
    error = {"$ref": _IN_COMPONENTS.format(model="ErrorAnswer")}
    responses["default"] = {
        "description": "Any other error.",
        "content": {"application/json": {"schema": error}},
    }
