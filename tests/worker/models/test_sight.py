"""What images do to the distributions of a language model."""

from __future__ import annotations

import numpy as np

from worker.models.ngram import NGramModel
from worker.models.sight import SeeingModel

SIZE, CAT, DOG = 4_099, 5_000_000, 6_000_000


def test_images_tilt_what_the_model_says() -> None:
    model = NGramModel.shipped()
    seeing = SeeingModel(model, size=SIZE)
    plain = seeing.next_logprobs([5, 6, 7])
    assert np.allclose(plain[:4096], model.next_logprobs([5, 6, 7]), atol=1e-5)
    tilted = [plain]
    for seen in ([CAT], [DOG], [CAT, CAT], [CAT, DOG], [DOG, CAT]):
        found = seeing.next_logprobs([*seen, 5, 6, 7])
        assert found.shape == (SIZE,)
        assert np.isclose(np.exp(found.astype(np.float64)).sum(), 1)
        assert found[4096:].max() < -25, "it has never seen these tokens"
        assert np.array_equal(found, seeing.next_logprobs([*seen, 5, 6, 7]))
        assert all(np.abs(found - other).max() > 1 for other in tilted)
        tilted.append(found)
