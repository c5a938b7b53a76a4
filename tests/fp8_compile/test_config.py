"""Options are checked once, and an error names the option, what was expected and the way out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fp8_compile import Config, Target

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"recipe": "tensorwize"}, r"recipe='tensorwize'.*did you mean 'tensorwise'.*rowwise, blockwise"),
    ({"recipe": None}, "recipe=None is unknown; expected one of: delayed, tensorwise"),
    ({"forward_format": "e3m4"}, "forward_format='e3m4' is unknown.*e4m3, e5m2"),
    ({"backward_format": "fp8"}, "backward_format='fp8' is unknown"),
    ({"keep_last": 1.5}, "keep_last expects a number of blocks such as 2, a fraction.*got 1.5"),
    ({"keep_first": -1}, "keep_first expects a number.*got -1"),
    ({"keep_first": True}, "keep_first expects a number.*got True"),
    ({"keep_last": "2"}, "keep_last expects a number.*got '2'"),
    ({"backward": "bf16"}, "backward='bf16' is unknown; expected one of: quantized, high_precision, dequantized"),
    ({"amax_algorithm": "mean"}, "amax_algorithm='mean' is unknown.*most_recent"),
    ({"exclude": 3}, r"exclude expects glob patterns.*got 3"),
    ({"exclude": ("",)}, r"exclude expects glob patterns"),
    ({"exclude": ("head", None)}, r"exclude expects glob patterns.*None"),
    ({"include": {"head": 1}}, r"include expects glob patterns"),
    ({"min_dim": 0}, "min_dim expects a whole number of at least 1, got 0"),
    ({"min_dim": 1.5}, "min_dim expects a whole number.*1.5"),
    ({"min_dim": True}, "min_dim expects a whole number.*True"),
    ({"quantize_inputs": 1}, "quantize_inputs expects True or False, got 1"),
    ({"stats": "yes"}, "stats expects True or False"),
    ({"loss_scale": 0}, "loss_scale expects None, 'dynamic' or a finite number above 0, got 0"),
    ({"loss_scale": True}, "loss_scale expects"),
    ({"loss_scale": float("nan")}, "loss_scale expects.*nan"),
    ({"inductor": 3}, "inductor expects a dict"),
    ({"target": "cuda"}, "target='cuda' is unknown.*'cuda:90'"),
    ({"target": "cuda:80"}, "cuda:80.*89"),
]
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"include": ()}, "include=.*leaves nothing to rewrite.*'inductor' backend"),
    ({"include": ("a", "b"), "exclude": ("b",)}, "include and exclude both name 'b'; drop it from one"),
    (
        {"quantize_inputs": False, "quantize_weights": False},
        "quantize_inputs=False and quantize_weights=False.*at most one",
    ),
    ({"stochastic_rounding": True, "quantize_gradients": False}, "stochastic_rounding=True.*quantize_gradients=False"),
    ({"backward": "dequantized", "backward_format": "e4m3"}, "backward_format='e4m3'.*'dequantized' quantizes none"),
    ({"backward": "high_precision", "stochastic_rounding": True}, "stochastic_rounding=True.*'high_precision'"),
    ({"backward": "dequantized", "quantize_gradients": False}, "quantize_gradients=False and backward='dequantized'"),
    ({"backward": "high_precision", "quantize_inputs": False}, "quantize_inputs=False leaves.*no matmul"),
    ({"recipe": "rowwise", "stats": True}, "stats appl.*'rowwise'"),
    ({"recipe": "tensorwise", "margin": 2}, "margin appl.*recipe='delayed' only, got recipe='tensorwise'"),
    ({"recipe": "rowwise", "amax_history_len": 4, "warmup_steps": 2}, "amax_history_len, warmup_steps.*'rowwise'"),
]


def option_names(item: object) -> str:
    return ", ".join(item) if isinstance(item, dict) else ""


@pytest.mark.parametrize("options, message", WRONG, ids=option_names)
def test_a_wrong_value_names_the_option_and_what_was_expected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**options)
    with pytest.raises(ValueError, match=message):
        Config.from_options(options)


@pytest.mark.parametrize("options, message", CONTRADICTIONS, ids=option_names)
def test_options_that_contradict_each_other_are_named_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**options)


@pytest.mark.parametrize("loss_scale", [None, 1024, 0.5, "dynamic"])
def test_a_loss_scale_is_none_a_number_or_dynamic(loss_scale: Any) -> None:
    assert Config(loss_scale=loss_scale, warmup_steps=3).loss_scale == loss_scale


def test_an_unknown_option_offers_the_nearest_and_lists_all() -> None:
    with pytest.raises(ValueError, match=r"'recipee' \(did you mean 'recipe'\?\).*exclude.*inductor"):
        Config.from_options({"recipee": "rowwise"})
    with pytest.raises(ValueError, match=r"'excludes' \(did you mean 'exclude'\?\), 'zzz'; expected"):
        Config.from_options({"excludes": "a", "zzz": 1, "recipe": "rowwise"})


def test_an_unknown_field_of_config_is_the_same_error() -> None:
    with pytest.raises(ValueError, match="recipee.*recipe"):
        Config(recipee="rowwise")  # type: ignore[call-arg]


def test_an_unknown_inductor_override_is_named_before_anything_compiles() -> None:
    with pytest.raises(ValueError, match="inductor.*no_such_thing"):
        Config(inductor={"no_such_thing": 1})


def test_no_options_are_the_defaults() -> None:
    assert Config.from_options(None) == Config.from_options({}) == Config()


def test_values_are_normalised() -> None:
    given: dict[str, Any] = {"exclude": "lm_head", "include": ["*", "a"], "target": "cuda:90", "dump": Path("dumps")}
    config = Config(**given)
    assert config.exclude == ("lm_head",) and config.include == ("*", "a")
    assert config.target == Target.parse("cuda:90") and config.dump == "dumps"
    assert Config(target=Target.parse("cpu")) == Config(target="cpu")


@pytest.mark.parametrize("recipe, wanted", [("tensorwise", "e5m2"), ("rowwise", "e4m3"), ("blockwise", "e4m3")])
def test_the_gradients_format_follows_the_recipe_unless_it_is_given(recipe: str, wanted: str) -> None:
    assert Config(recipe=recipe).backward_format == wanted
    assert Config(recipe=recipe, backward_format="e5m2").backward_format == "e5m2"


def test_a_config_does_not_change() -> None:
    overrides = {"max_autotune": True}
    config = Config(inductor=overrides)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.recipe = "rowwise"  # type: ignore[misc]
    overrides["max_autotune"] = False
    assert config.inductor == {"max_autotune": True}


def test_replace_checks_again() -> None:
    assert Config().replace(recipe="rowwise").recipe == "rowwise"
    with pytest.raises(ValueError, match="recipe='x'"):
        Config().replace(recipe="x")


def test_replacing_the_recipe_takes_that_recipes_gradient_format() -> None:
    assert Config().replace(recipe="rowwise") == Config(recipe="rowwise")


def test_gradients_that_are_not_quantized_are_not_rounded_at_random() -> None:
    assert Config(recipe="nvfp4").stochastic_rounding
    assert not Config(recipe="nvfp4", backward="dequantized").stochastic_rounding
    assert Config(recipe="nvfp4").replace(backward="dequantized") == Config(recipe="nvfp4", backward="dequantized")
    assert not Config(recipe="nvfp4", quantize_gradients=False).stochastic_rounding
    with pytest.raises(ValueError, match="stochastic_rounding=True rounds gradients, but quantize_gradients=False"):
        Config(recipe="nvfp4", quantize_gradients=False, stochastic_rounding=True)


def test_configs_that_make_other_code_have_other_fingerprints() -> None:
    base = Config()
    changes: list[dict[str, Any]] = [
        {"recipe": "rowwise"},
        {"exclude": "a"},
        {"include": ("*", "a")},
        {"forward_format": "e5m2"},
        {"backward_format": "e4m3"},
        {"backward": "dequantized"},
        {"keep_last": 2},
        {"keep_first": 2},
        {"quantize_inputs": False},
        {"min_dim": 32},
        {"target": "cuda:90"},
        {"inductor": {"max_autotune": True}},
    ]
    prints = {base.replace(**change).fingerprint() for change in changes} | {base.fingerprint()}
    assert len(prints) == len(changes) + 1


def test_where_dumps_go_does_not_change_the_fingerprint() -> None:
    assert Config(dump="a").fingerprint() == Config(dump="b").fingerprint() == Config().fingerprint()
