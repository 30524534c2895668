"""Hand-written pipelines for tests of HTTP: pictures with transparency."""

from __future__ import annotations

from typing import Any

import numpy as np
from support_pipelines import PatternPipeline


class ClearPipeline(PatternPipeline):
    """Its pictures' left half is transparent."""

    makes_transparency = True

    def _output(self, request: Any) -> Any:
        output = super()._output(request)
        output.images = [_half_clear(picture) for picture in output.images or ()]
        return output


def _half_clear(picture: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    alpha = np.full(picture.shape[:2], 255, np.uint8)
    alpha[:, : picture.shape[1] // 2] = 0
    return np.dstack([picture, alpha])
