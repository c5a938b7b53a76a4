"""Two ranks have the same scales, and train on from a checkpoint as if it had not been: DDP, FSDP2, tensor parallel."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from two_ranks import HIDDEN, WIDTH, Blocks, make_optimizer, train, train_and_switch
from uncompiled import UncompiledBackend

import fp8_compile
from fp8_compile.scaling.distributed_checkpoint import load_scaling_state
from fp8_compile.scaling.model_state import request
from fp8_compile.training.amax_reduction import AmaxReduction, reduces_amaxes


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_ddp_has_equal_scales_on_both_ranks_and_those_of_one_process_with_the_whole_batch(ranks) -> None:
    first, second = ranks["ddp"]
    assert first["graphs"] == 3 and first["skipped"] == 0, "split at the buckets, and every matmul in FP8"
    assert same(first["before"], second["before"]) and same(first["after"], second["after"])
    assert first["losses"] != second["losses"], "each has seen its own rows"

    model = Blocks()
    compiled = torch.compile(model, backend="fp8")
    state = fp8_compile.scaling_state(model)
    state.load_state_dict(first["before"])
    losses = train(compiled, make_optimizer(model), range(2, 3))
    assert sum(first["losses"] + second["losses"]) / 2 == pytest.approx(losses[0], rel=1e-5)
    whole = state.state_dict()
    assert whole.keys() == first["after"].keys()
    forward = [key for key in whole if ".grad_output" not in key]
    assert len(forward) == 8 * 4 and all(torch.equal(whole[key], first["after"][key]) for key in forward)
    # The mean over half of the rows has gradients twice as large, but for the rounding of FP8 on the way.
    gradients = [key for key in whole if key.endswith("grad_output.amax_history")]
    newest = [float(first["after"][key][2] / whole[key][2]) for key in gradients]
    assert len(newest) == 4 and newest == pytest.approx(4 * [2], rel=0.1)


def test_ddp_renews_its_copies_after_steps_and_after_load_state_dict(ranks) -> None:
    shapes = {f"blocks.{i}.{name}#0.weight" for i in range(2) for name in ("up", "down")}
    for rank in ranks["ddp"]:
        assert set(rank["copies"]) == shapes and rank["refreshes"] == 4, "in the first step each part makes its own"


def test_fsdp2_goes_on_from_a_checkpoint_bit_for_bit_and_keeps_no_copies_of_what_it_shards(ranks) -> None:
    for rank in ranks["fsdp"]:
        went_on, resumed = rank["losses"]
        assert went_on == resumed and rank["copies"] == [{}, {}]
        assert all(torch.equal(a, b) for a, b in zip(*rank["parameters"], strict=True))
        assert same(*rank["states"]) and not same(rank["saved"], rank["states"][0])
    assert same(ranks["fsdp"][0]["states"][0], ranks["fsdp"][1]["states"][0])


def test_blocks_that_are_recomputed_compiled_and_sharded_one_by_one_share_code_and_have_states(ranks) -> None:
    for rank in ranks["by_block"]:
        assert rank["losses"][0] == rank["losses"][1] == rank["losses"][2]
        # The input of the first block has no gradient: it has a graph of its own.
        assert rank["graphs"] == [[6, 6]] * 3
        for first, second in rank["states"]:
            assert first.keys() == second.keys() and len(first) == 4 * 6 and not same(first, second)
        assert all(same(a, b) for way in rank["states"][1:] for a, b in zip(way, rank["states"][0], strict=True))
    first, second = (rank["states"] for rank in ranks["by_block"])
    assert all(same(a, b) for one, other in zip(first, second) for a, b in zip(one, other)), "all ranks have the same"


def test_a_checkpoint_of_two_ranks_is_read_by_one_process(ranks, ranks_folder) -> None:
    model = Blocks(seed=2)
    loaded = {"model": model.state_dict()}
    dcp.load(loaded, checkpoint_id=ranks_folder / "checkpoint")
    model.load_state_dict(loaded["model"])
    load_scaling_state(model, ranks_folder / "checkpoint")
    state = fp8_compile.scaling_state(model)
    assert same(state.state_dict(), ranks["fsdp"][0]["saved"])
    compiled = torch.compile(model, backend=UncompiledBackend())
    losses = train(compiled, make_optimizer(model), range(2, 3))
    halves = [rank["losses"][0][0] for rank in ranks["fsdp"]]
    assert losses[0] == pytest.approx(sum(halves) / 2, rel=1e-5)
    with pytest.raises(ValueError, match="no scaling state under 'scales'; it has model, optimizer, scaling"):
        load_scaling_state(model, ranks_folder / "checkpoint", key="scales")


def test_tensor_parallel_ranks_share_scales_and_copy_their_own_half_of_each_weight(ranks) -> None:
    first, second = ranks["tensor_parallel"]
    assert first["losses"] == second["losses"] and same(first["last"], second["last"])
    assert set(first["copies"].values()) == {(HIDDEN // 2, WIDTH)} and first["refreshes"] == 3  # [64, 32] by rows,
    # and [32, 64] by columns: both are [32, 32]
    model = Blocks()
    losses = train(torch.compile(model, backend=UncompiledBackend()), make_optimizer(model), range(3))
    assert first["losses"] == pytest.approx(losses, rel=1e-2)
    whole = fp8_compile.scaling_state(model).state_dict()
    assert whole.keys() == first["last"].keys()
    weights = [key for key in whole if key.endswith("weight.amax_history")]
    for key in weights:  # of the first step: the largest of both halves
        assert whole[key][0] == first["last"][key][0]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_switch_in_mid_run_and_back_is_the_same_on_both_ranks_and_in_one_process(ranks, kind) -> None:
    first, second = (rank[kind] for rank in ranks["switched"])
    assert first["rows"] == second["rows"] and sum(first["rows"]) == 4, "the products of forward, once for each graph"
    assert all(same(*states) for states in zip(first["states"], second["states"], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first["parameters"], second["parameters"], strict=True))

    torch._dynamo.reset()
    model = Blocks()
    alone = train_and_switch(model, torch.compile(model, backend=UncompiledBackend()))
    halves = [sum(losses) / 2 for losses in zip(first["losses"], second["losses"])]
    # Gradients of half of the rows are twice as large, and FP8 rounds them otherwise: 0.25 % at most was seen.
    assert halves == pytest.approx(alone["losses"], rel=1e-2) and len(halves) == 6
    assert [one.keys() for one in first["states"]] == [one.keys() for one in alone["states"]]
    assert ["precision" in one for one in first["states"]] == [False, True, False]


def test_a_rank_without_gradients_takes_part_in_the_decision_to_skip(ranks) -> None:
    scale = 2.0**16
    for rank in ranks["without_gradients"]:
        assert rank["seen"] == [[scale, 0], [scale / 2, 1], [scale / 2, 1]]


def test_ranks_of_which_one_has_not_compiled_its_loss_scaling_yet_are_told(ranks) -> None:
    first, second = ranks["without_gradients"]
    assert "rank 0 has 0 quantized tensors (...) and loss scaling on" in first["told"]
    assert "rank 1 has 0 quantized tensors (...) and loss scaling off" in second["told"]


def test_amaxes_of_micro_batches_are_held_until_the_update_and_backward_refuses_scales_from_after_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 48, bias=False))
    request(model).held = True
    compiled, state = torch.compile(model, backend="fp8"), fp8_compile.scaling_state(model)
    x = torch.randn(16, 32)
    x[0, 0] = 8
    for factor in (1, 4, 2):
        compiled(x * factor).sum().backward()
    assert all(not saved.any() for key, saved in state.state_dict().items() if key.endswith("history"))
    state.update()
    saved = state.state_dict()
    assert saved["0#0.input.amax_history"][:2].tolist() == [32, 0] and saved["0#0.input.counts"][:2].tolist() == [1, 1]
    assert saved["0#0.input.scale"] == torch.tensor(448.0) / 32 / 2**2, "with the margin of inputs"
    loss = compiled(x).sum()
    state.update()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_ranks_that_compiled_other_matmuls_are_told(monkeypatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 48, bias=False))
    reduction = AmaxReduction(model)

    def with_other_rank(message: Tensor, *arguments: object, group: object) -> None:
        message[:2] = torch.maximum(message[:2], torch.tensor([12345, -12345], dtype=torch.int32))

    monkeypatch.setattr(torch.distributed, "all_reduce", with_other_rank)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with pytest.raises(ValueError, match="rank 0 has 0 quantized tensors .* amax_reduction='local'"):
        reduction.reduce()


def test_without_slots_the_ranks_agree_from_where_the_model_is(monkeypatch) -> None:
    """As under other recipes than delayed. NCCL refuses a tensor on the CPU."""
    sent: list[torch.device] = []

    def all_reduce(message: Tensor, *arguments: object, group: object) -> None:
        sent.append(message.device)
        raise InterruptedError

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    with pytest.raises(InterruptedError):
        AmaxReduction(torch.nn.Linear(32, 48, device="meta")).reduce()
    assert sent == [torch.device("meta")]


def test_settings_that_make_no_sense_are_refused() -> None:
    assert reduces_amaxes(None) is False and reduces_amaxes("local") is False
    with pytest.raises(ValueError, match="expects 'max', 'local' or None, got 'mean'"):
        reduces_amaxes("mean")
    with pytest.raises(ValueError, match="init_process_group"):
        reduces_amaxes("max")


