"""What a configuration and a target mean for the matmuls of a graph."""

from __future__ import annotations

from fp8_compile.config import Config
from fp8_compile.passes.graph.roles import Role
from fp8_compile.passes.graph.rules import Rules
from fp8_compile.scaling.model_state import model_state
from fp8_compile.selection import Selection
from fp8_compile.target import Target
from fp8_compile.torch_internals import patches

from .module_names import visible_roots


def make_rules(config: Config, target: Target, selection: Selection) -> Rules:
    """What config and target mean for a matmul."""
    fields = {"quantize_inputs": Role.INPUT, "quantize_weights": Role.WEIGHT, "quantize_gradients": Role.GRAD_OUTPUT}
    return Rules(
        recipe=config.recipe,
        target=str(target),
        forward=target.format(str(config.forward_format)),
        backward=target.format(str(config.backward_format)),
        excluded=selection.reason_against,
        min_dim=config.min_dim,
        unquantized=frozenset(role for field, role in fields.items() if not getattr(config, field)),
        stochastic=frozenset({Role.GRAD_OUTPUT}) if config.stochastic_rounding else frozenset(),
        recipe_supported=_supported(config.recipe, target),
        alignment=target.alignment,
        needs_k_contiguous=target.needs_k_contiguous,
        reads_any_layout=target.reads_any_layout,
        e5m2_by_e5m2=target.e5m2_by_e5m2,
        only_output=target.rowwise_output if config.recipe in ("rowwise", "blockwise") else None,
        grouped=target.grouped,
        gradients=config.backward,
        four_over_six=config.four_over_six,
    )


class Precision:
    """The gemms that are in high precision for now, by module. What no module wrote goes by the module around it."""

    def __init__(self) -> None:
        self.by_module: dict[str, frozenset[str]] = {}
        for prefix, root in visible_roots():
            for name, module in root.named_modules():
                self.by_module[".".join(part for part in (prefix, name) if part)] = model_state(module).high

    def __call__(self, module: str) -> frozenset[str]:
        while module and module not in self.by_module:
            module = module.rpartition(".")[0]
        return self.by_module.get(module, frozenset())

    @property
    def fingerprint(self) -> list[tuple[str, list[str]]]:
        return sorted((name, sorted(gemms)) for name, gemms in self.by_module.items() if gemms)


def _supported(recipe: str, target: Target) -> bool:
    """True if the target multiplies as the recipe wants it, and Inductor's code around that is right."""
    wrong = recipe == "blockwise" and str(target) == "cpu" and not patches.fits("loop_split")
    return recipe in target.recipes and not wrong
