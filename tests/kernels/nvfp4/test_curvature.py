"""What the methods take from a Hessian."""

from __future__ import annotations

import pytest
import torch

from fp8_compile.kernels.nvfp4 import curvature


def hessian(k: int, tokens: int = 512) -> torch.Tensor:
    x = torch.randn(tokens, k) @ (torch.randn(k, k) / k**0.5 * torch.linspace(0.2, 3, k))
    return x.t() @ x / tokens


def test_the_factor_is_a_root_of_the_inverse() -> None:
    h = curvature.damped(hessian(64), 0.01)
    factor = curvature.inverse_factor(h).double()
    assert torch.equal(factor, factor.triu())
    torch.testing.assert_close(factor.t() @ factor @ h.double(), torch.eye(64).double(), rtol=0, atol=1e-4)


def test_damping_grows_until_a_hessian_is_positive_definite_and_says_when_it_never_is() -> None:
    def found(hessian: torch.Tensor, order: str = "pivot") -> torch.Tensor:
        columns, ordered, factor = curvature.factored(hessian, max(1, len(hessian) // 16), 0.01, order)
        assert torch.equal(factor, curvature.inverse_factor(ordered))
        return ordered[columns.argsort()][:, columns.argsort()]

    h = hessian(32)
    slightly = torch.eye(32) - 0.05 * torch.ones(32, 32)  # its smallest eigenvalue is -0.6
    for order in curvature.ORDERS:
        assert torch.equal(found(h, order), curvature.damped(h, 0.01))
        assert torch.linalg.eigvalsh(found(slightly, order))[0] > 0
    for never in (-1e6 * torch.ones(32, 32) + 1e6 * torch.eye(32), torch.full((32, 32), torch.nan)):
        with pytest.raises(ValueError, match="not positive semidefinite; calibrate on more tokens"):
            found(never)
    assert torch.equal(found(torch.zeros(4, 4)), 0.01 * torch.eye(4))


def test_orders_keep_blocks_together_and_follow_their_energy() -> None:
    h = curvature.damped(hessian(64), 0.01)
    for name in curvature.ORDERS:
        order = curvature.column_order(h, 4, name)
        assert torch.equal(order.sort().values, torch.arange(64))
        assert (order.view(4, 16) // 16 == order.view(4, 16)[:, :1] // 16).all(), "a block's columns stay together"
    assert torch.equal(curvature.column_order(h, 4, "natural"), torch.arange(64))
    assert torch.equal(curvature.column_order(h, 4, "energy").view(4, 16)[:, 0] // 16, torch.arange(3, -1, -1))


def test_the_pivot_order_takes_from_the_end_what_has_the_least_energy_left() -> None:
    """Against Schur complements computed from scratch, in FP64."""
    h = curvature.damped(hessian(80), 0.01)
    order = curvature.column_order(h, 5, "pivot")
    wide, last = h.double(), order.new_empty(0)
    for block in range(4, -1, -1):
        left = [b for b in range(5) if b * 16 not in set((last // 16 * 16).tolist())]
        energies = {}
        for b in left:
            own = torch.arange(16 * b, 16 * b + 16)
            rest = wide[own][:, own]
            if len(last):
                across = wide[own][:, last]
                rest = rest - across @ torch.linalg.solve(wide[last][:, last], across.t())
            energies[b] = float(rest.trace())
        taken = order[16 * block : 16 * block + 16]
        assert int(taken[0]) // 16 == min(energies, key=energies.get)
        last = torch.cat([taken, last])
