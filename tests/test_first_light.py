"""The whole path on hand-written pipelines: routing, batching, lives, aborts."""

from __future__ import annotations

import numpy as np
from support_pipelines import pattern

from omni_engine import OmniClient, OmniDiffusionSamplingParams


def test_outputs_come_in_order_with_their_own_pictures(client: OmniClient) -> None:
    params = [OmniDiffusionSamplingParams(seed=seed) for seed in range(8)]
    outputs = client.generate([f"prompt {i}" for i in range(8)], params)
    for i, output in enumerate(outputs):
        assert output.raise_for_error().images is not None
        np.testing.assert_array_equal(output.images[0], pattern(f"prompt {i}", i, 16, 16))
    assert [output.metrics.max_batch_size for output in outputs] == [4] * 8
