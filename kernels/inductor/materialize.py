"""The lowering of ``kernels/materialize.py``: the value gets a buffer, and nothing is copied."""

from __future__ import annotations

from typing import Any

from torch._inductor.lowering import register_lowering

from fp8_compile.kernels.materialize import materialize_op


@register_lowering(materialize_op, type_promotion_kind=None)
def _lowering(x: Any) -> Any:
    x.realize()
    return x
