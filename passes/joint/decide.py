"""Decide for one matmul whether it runs in FP8, and how; or why not. Pure: no graph is needed to test it."""

from __future__ import annotations

import dataclasses

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from fp8_compile.kernels.formats import Format
from fp8_compile.kernels.quantize import HIGH_PRECISION, WHOLE

from ..graph.matmul import GroupedMatmul, Matmul
from ..graph.roles import Origin, Role
from ..graph.rules import Rules
from .dequantize_forward import is_known

# Padding K or N pays while it adds at most a quarter to the multiplications: an FP8 gemm has twice the rate of
# a bf16 one, and half of that gain is what the quantizes cost.
MOST_PADDING = 1.25
# One product per slice is one kernel launch per slice; beyond this number a stack of small gemms loses to one bmm.
MOST_SLICES = 64
TILE = 128
FILLED = 128  # on a GPU, groups of MXFP8 are filled up to multiples of it
ACTIVATIONS = "activation by activation stays in high precision"

Block = tuple[int, int]  # rows x contraction, as seen by the gemm; see kernels/quantize.py
BLOCKS: dict[str, dict[Role, Block]] = {
    "delayed": {role: (WHOLE, WHOLE) for role in Role},
    "tensorwise": {role: (WHOLE, WHOLE) for role in Role},
    "rowwise": {role: (1, WHOLE) for role in Role},
    "blockwise": {Role.INPUT: (1, TILE), Role.GRAD_OUTPUT: (1, TILE), Role.WEIGHT: (TILE, TILE)},
    "mxfp8": {Role.INPUT: (1, 32), Role.GRAD_OUTPUT: (1, 32), Role.WEIGHT: (32, 32)},
    "nvfp4": {Role.INPUT: (1, 16), Role.GRAD_OUTPUT: (1, 16), Role.WEIGHT: (16, 16)},
}
BLOCKS_ALONG_K = {"blockwise": TILE, "mxfp8": 32, "nvfp4": 16}


@dataclasses.dataclass(frozen=True)
class OperandPlan:
    """How one operand is quantized: ``block`` is (rows, contraction) of the gemm."""

    format: Format
    block: Block


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """Run in FP8. N and K are filled with zeros up to multiples of ``align_n`` and ``align_k``; 1: as they are."""

    left: OperandPlan
    right: OperandPlan
    align_n: int = 1
    align_k: int = 1
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Skip:
    """Stay in high precision."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Dequantize(Skip):
    """Stay in high precision, and read the forward product's operand as it was quantized."""


def decide(site: Matmul, rules: Rules) -> Rewrite | Skip:
    """The decision for one matmul; the first reason against it is the one reported."""
    for check in (_name_reason, _operand_reason, _dtype_reason):
        if (reason := check(site, rules)) is not None:
            return Skip(reason)
    if site.gemm in rules.high(site.module):
        return Skip(f"set_precision({site.gemm}='high')")
    if site.gemm != "output" and rules.gradients != "quantized":
        return _in_high_precision(site, rules)
    for check in (_role_reason, _group_reason, _size_reason):
        if (reason := check(site, rules)) is not None:
            return Skip(reason)
    left, right = (_plan(operand.role, rules) for operand in (site.left, site.right))
    if left.format.significand_bits == right.format.significand_bits == 3 and not rules.e5m2_by_e5m2:
        return Skip(f"{rules.target} can't multiply {left.format} by {right.format}")
    if isinstance(site, GroupedMatmul):
        return Rewrite(left, right, reason=rules.recipe)
    return _with_padding(site, left, right, rules)


def _in_high_precision(site: Matmul, rules: Rules) -> Skip:
    """What a backward product reads that is not quantized."""
    if rules.gradients == "high_precision":
        return Skip("backward='high_precision'")
    forward = decide(site.forward, rules) if site.forward is not None else None
    if isinstance(forward, Skip):
        return forward  # of what was multiplied as it is, this is the gradient as it is
    if not is_known(site):
        return Skip("backward='dequantized': reads the original tensors, because its forward product is not known")
    return Dequantize(f"backward='dequantized': reads what forward multiplied, in {_dtype_name(site.dtype)}")


def _name_reason(site: Matmul, rules: Rules) -> str | None:
    return rules.excluded(site.module, site.weights)


def _operand_reason(site: Matmul, rules: Rules) -> str | None:
    """Only a product of a weight with something that flows is eligible. A tensor that comes in from outside may be
    anything, such as scores after a graph break."""
    forward = site.forward or site
    if site.gemm != "output" and site.forward is None:
        operands = [operand for operand in (site.left, site.right) if operand.role is not Role.GRAD_OUTPUT]
    else:
        operands = [forward.left, forward.right]
    is_weight = any(operand.origin.is_weight for operand in operands)
    if site.makes_weight and (is_weight or site.gemm != "output"):
        return "makes a weight: what is computed from parameters alone stays in high precision"
    if is_weight:
        return None
    if any(operand.gathered for operand in operands):
        return "gathered weights: as many products as tokens"
    if any(operand.origin in (Origin.BUFFER, Origin.CONSTANT) for operand in operands):
        return "product with a buffer or a constant, not with a parameter"
    if not forward.batched and any(operand.root.op == "placeholder" for operand in operands):
        return f"{ACTIVATIONS} (a weight is a parameter, or a buffer or argument that include names)"
    return ACTIVATIONS


def _dtype_reason(site: Matmul, rules: Rules) -> str | None:
    if site.dtype not in HIGH_PRECISION:
        return f"dtype {_dtype_name(site.dtype)}: expected float32, bfloat16 or float16"
    return None


def _role_reason(site: Matmul, rules: Rules) -> str | None:
    if not rules.recipe_supported:
        return f"{rules.target} has no {rules.recipe} FP8 gemm"
    if rules.recipe == "blockwise" and rules.block_scaled is not None:
        if {rules.forward.significand_bits, rules.backward.significand_bits} != {4}:
            return f"{rules.target} multiplies blocks of e4m3 only: leave forward_format and backward_format at e4m3"
        if rules.stochastic:
            return f"{rules.target} has no stochastic rounding of blocks: leave stochastic_rounding at False"
    for operand in (site.left, site.right):
        if operand.role in rules.unquantized:
            return f"quantize_{_FIELD[operand.role]}=False"
    return None


_FIELD = {Role.INPUT: "inputs", Role.WEIGHT: "weights", Role.GRAD_OUTPUT: "gradients"}


def _group_reason(site: Matmul, rules: Rules) -> str | None:
    """Why a product of groups, whose sizes are known only when it runs, can't be an FP8 gemm."""
    if not isinstance(site, GroupedMatmul):
        return None
    kind = rules.block_scaled or ("fp8" if rules.recipe not in BLOCKS_ALONG_K else rules.recipe)
    if kind not in rules.grouped:
        return _why_not_grouped(rules)
    groups, m, n, k = site.shape
    over_tokens = site.product.contracts
    tokens, *weight = (k, m, n) if over_tokens else (m, n, k)
    if statically_known_true(tokens < groups):
        # Mostly when decoding: the product reads the experts that are chosen, a quantize would read all of them.
        return f"ragged groups: {tokens} tokens for {groups} experts, which would all be quantized"
    if kind == "mxfp8" or rules.recipe == "rowwise":
        if not all(isinstance(size, int) for size in weight):
            return "a size is known only when it runs"
    if kind == "mxfp8":
        return _mx_group_reason(site, rules)
    if rules.alignment == 1:
        return None
    for format in {_plan(operand.role, rules).format: None for operand in (site.left, site.right)}:
        if format.significand_bits != 4:
            return f"ragged groups: torch multiplies them in e4m3 only, not in {format}"
    return _size_of_experts(site, rules.alignment)


def _why_not_grouped(rules: Rules) -> str:
    """The recipe's gemm is not one that the target has for groups."""
    if rules.recipe in BLOCKS_ALONG_K and rules.block_scaled != "mxfp8":
        return f"ragged groups: blocks of {BLOCKS_ALONG_K[rules.recipe]} would reach from one group into the next"
    if "mxfp8" in rules.grouped:
        return f"ragged groups: {rules.target} multiplies them in MXFP8 only (recipe='mxfp8')"
    return f"ragged groups: torch has no FP8 gemm of them for {rules.target}"


def _mx_group_reason(site: GroupedMatmul, rules: Rules) -> str | None:
    if rules.gradients == "dequantized":
        return "backward='dequantized': what experts multiply in MXFP8 can't be read again"
    multiple = 32 if rules.target == "cpu" else FILLED
    if (reason := _size_of_experts(site, multiple)) is not None or rules.target == "cpu":
        return reason
    groups, *sizes = site.shape
    tokens = sizes[2 if site.product.contracts else 0]
    if statically_known_true(tokens < groups * FILLED):
        return f"ragged groups: {tokens} tokens for {groups} experts, fewer than the {FILLED} that each is filled up to"
    return None


def _size_of_experts(site: GroupedMatmul, multiple: int) -> str | None:
    """Experts are not padded."""
    _, m, n, k = site.shape
    named = {"M": m, "N": n} if site.product.contracts else {"N": n, "K": k}
    for name, size in named.items():
        if not statically_known_true(size % multiple == 0):
            return f"ragged groups: {name}={size} is not a multiple of {multiple}"
    return None


def _size_reason(site: Matmul, rules: Rules) -> str | None:
    """The layer's own sizes decide, for all three gemms alike; the number of tokens does not."""
    *batch, m, n, k = site.shape
    if any(statically_known_true(size == 0) for size in site.shape):
        return "no elements"
    if batch and not isinstance(site, GroupedMatmul):
        if not isinstance(batch[0], int):
            return "the number of stacked products is known only when it runs"
        if batch[0] > MOST_SLICES:
            return f"{batch[0]} stacked products would be {batch[0]} kernels (at most {MOST_SLICES})"
    named = {"M": m, "N": n, "K": k}
    named.pop(token_dim(site))
    for name, size in named.items():
        if isinstance(size, int) and size < rules.min_dim:
            return f"{name}={size} is below min_dim={rules.min_dim}"
    many_scales = rules.recipe == "rowwise" or rules.recipe in BLOCKS_ALONG_K
    if free_unbacked_symbols([m, n, k]) and (rules.alignment > 1 or many_scales):
        return "a size is known only when it runs"
    return None


def token_dim(site: Matmul) -> str:
    """Which of M, N and K is the number of tokens: the one that the weight does not have."""
    if site.gemm == "grad_weight":
        return "K"
    weight_is_left = site.left.role is Role.WEIGHT
    return "N" if weight_is_left else "M"


def _plan(role: Role, rules: Rules) -> OperandPlan:
    format = rules.backward if role is Role.GRAD_OUTPUT else rules.forward
    return OperandPlan(format, BLOCKS[rules.recipe][role])


def _with_padding(site: Matmul, left: OperandPlan, right: OperandPlan, rules: Rules) -> Rewrite | Skip:
    """Pad N and K to what the target wants where that pays; the number of tokens is always padded."""
    *_, n, k = site.shape
    along_k = BLOCKS_ALONG_K.get(rules.recipe, rules.alignment) if rules.alignment > 1 else 1
    along_n = along_k if rules.recipe == "mxfp8" else rules.alignment
    wanted = {"N": (n, along_n), "K": (k, along_k)}
    align, padded, growth = {"N": 1, "K": 1}, {}, {"N": 1.0, "K": 1.0}
    for dim, (size, multiple) in wanted.items():
        if statically_known_true(size % multiple == 0):
            continue
        align[dim], padded[dim] = multiple, f"{dim}={size} padded to a multiple of {multiple}"
        if isinstance(size, int) and token_dim(site) != dim:
            growth[dim] = (size + -size % multiple) / size
    if (work := growth["N"] * growth["K"]) > MOST_PADDING:
        worst = max(growth, key=growth.__getitem__)
        size, multiple = wanted[worst]
        return Skip(f"{worst}={size} is not a multiple of {multiple}, and padding would make it {work:.1f}x the work")
    return Rewrite(left, right, align["N"], align["K"], ", ".join([rules.recipe, *padded.values()]))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
