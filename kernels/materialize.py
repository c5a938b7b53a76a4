"""A tensor that is stored in memory before anything reads it.

    materialize(x) = x

Inductor computes a cheap tensor again wherever it is read. Where a loop reads it thousands of times, as the one row of
a product is read for each column, that costs more than the loop itself.
"""

from __future__ import annotations

import torch

from .define_op import define

materialize_op = define("materialize(Tensor x) -> Tensor", torch.clone, torch.empty_like)
