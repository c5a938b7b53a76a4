"""How many bytes the gemms move, before and after: an estimate from the sizes of tensors.

Before:  sum over rewritten matmuls of  bytes(left) + bytes(right) + bytes(result)
After:   the same for the FP8 gemms that replace them, and what it takes to quantize their operands:
         writes   bytes of FP8 tensors and scales, where quantizes are fused with what computes the tensor
         reads    and of the tensors that they are made from, where each is a kernel of its own

Each operand counts as read once and each result as written once; caches, tiles and fusion by Inductor are not modelled.
Products that are one operation with several results (both gradients of experts) share what it reads.
"""

from __future__ import annotations

import dataclasses

from .graph_stages import Stage


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that one run of the graph moves. After the rewrite they are between ``after_fused`` and ``after_apart``."""

    gemms_before: int
    gemms_after: int
    quantize_writes: int
    quantize_reads: int
    uncounted: int  # matmuls with a size that is known only at run time
    by_site: dict[str, tuple[int, int]]  # matmul -> bytes of its gemms before and after

    @property
    def after_fused(self) -> int:
        return self.gemms_after + self.quantize_writes

    @property
    def after_apart(self) -> int:
        return self.after_fused + self.quantize_reads

    def to_dict(self) -> dict[str, object]:
        return {
            "what": "estimated from tensor sizes: each operand read once, each result written once",
            **dataclasses.asdict(self),
            "after_fused": self.after_fused,
            "after_apart": self.after_apart,
        }


def estimate(before: Stage, rewritten: Stage, sites: set[str]) -> Traffic:
    """Estimate the bytes of the matmuls in ``sites``, the names in ``before`` of those that were rewritten."""
    symbolic = {site for site in sites if _has_symbol(before, before.by_name[site])}
    counted = sites - symbolic
    by_site = {site: (_moved(before, before.by_name[site]), 0) for site in sorted(counted)}
    gemms = writes = reads = 0
    for index, site in enumerate(rewritten.columns["site"]):
        kind = rewritten.columns["kind"][index]
        if site not in counted or kind == "view":
            continue
        if kind == "fp8_matmul":
            moved = _moved(rewritten, index)
            gemms += moved
            by_site[site] = by_site[site][0], by_site[site][1] + moved
        else:
            writes += rewritten.columns["bytes"][index]
            reads += _read(rewritten, index)
    return Traffic(sum(old for old, _ in by_site.values()), gemms, writes, reads, len(symbolic), by_site)


def _moved(stage: Stage, index: int) -> int:
    return _read(stage, index) + stage.columns["bytes"][index]


def _read(stage: Stage, index: int) -> int:
    if _is_taken_out(stage, index):
        results = stage.inputs.count(stage.inputs[index])
        return _read(stage, stage.inputs[index][0]) // results
    return sum(stage.columns["bytes"][operand] for operand in stage.inputs[index])


def _has_symbol(stage: Stage, index: int) -> bool:
    if _is_taken_out(stage, index) and _has_symbol(stage, stage.inputs[index][0]):
        return True
    return any(stage.is_symbolic(one) for one in (index, *stage.inputs[index]))


def _is_taken_out(stage: Stage, index: int) -> bool:
    """True if a node is one result of an operation with several."""
    return bool(stage.columns["target"][index] == "_operator.getitem")
