"""A copy that stands in a graph until it is split, and is gone afterwards (``passes/joint/allow_recompute.py``).

    recompute_copy(x) = x
"""

from __future__ import annotations

import torch

from .define_op import define

recompute_copy_op = define("recompute_copy(Tensor x) -> Tensor", torch.clone, torch.empty_like)
