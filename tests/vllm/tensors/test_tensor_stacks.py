"""Layers that move as one tensor: which ones these are, and that their blocks arrive in the right places."""

import torch

from kvgrpc.integrations.vllm.tensors.stacks import stacks


def test_layers_that_follow_each_other_and_are_alike_go_together() -> None:
    small, large = torch.zeros(8, 2, 4), torch.zeros(8, 2, 8)
    other = torch.zeros(8, 2, 4, dtype=torch.float16)
    caches = {"0": small, "1": small, "2": small, "3": large, "4": large, "5": other, "6": small}
    expected = [(0, ("0", "1")), (2, ("2",)), (3, ("3", "4")), (5, ("5",)), (6, ("6",))]
    assert [(stack.number, stack.layers) for stack in stacks(caches, 2)] == expected
    assert [stack.layers for stack in stacks(caches, 9)] == [("0", "1", "2"), ("3", "4"), ("5",), ("6",)]
    assert len({stack.name(0) for stack in stacks(caches, 2)} | {stack.name(1) for stack in stacks(caches, 2)}) == 10


def test_blocks_come_where_they_belong_whatever_the_order_of_bytes_in_memory() -> None:
    whole = torch.randn(3, 2, 8, 4)
    ours = {name: whole[i].transpose(0, 1) for i, name in enumerate("abc")}  # blocks are not outermost
    theirs = {name: torch.zeros(8, 2, 4) for name in "abc"}
    (mine,), (yours,) = stacks(ours, 3), stacks(theirs, 3)
    made = mine.gather(ours, [5, 1, 6])
    assert made.is_contiguous()
    yours.scatter(theirs, [0, 7], made[:, 1:])
    for name in "abc":
        assert torch.equal(theirs[name][[0, 7]], ours[name][[1, 6]])
        assert not theirs[name][1:7].any()
