# SPDX-License-Identifier: Apache-2.0
"""The CPU communicator's all-reduce over a channel, as one op.

On the CPU, Dynamo traces through the communicator: without an op of its own, the
choice of the way and the call into the library would be traced too.
"""

from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch.distributed import ProcessGroup

from vllm.distributed.device_communicators.host_channels import HostChannels
from vllm.utils.torch_utils import direct_register_custom_op


class Communicator(Protocol):
    """What the op needs of ``CpuCommunicator``."""

    unique_name: str
    device_group: ProcessGroup
    dist_module: object
    host_channels: HostChannels | None


_communicators: WeakValueDictionary[str, Communicator] = WeakValueDictionary()


def reduce_over(communicator: Communicator) -> None:
    """Let the op find a communicator that reduces over channels. Local."""
    _communicators[communicator.unique_name] = communicator


def _all_reduce(tensor: torch.Tensor, group_name: str) -> None:
    """Sum a tensor in place over a group's ranks, all of which call this.

    The way depends on dtype, shape and contiguity alone, so all ranks go the
    same one: what no channel takes goes to the communicator's other module.
    """
    communicator = _communicators[group_name]
    transport = communicator.host_channels
    assert transport is not None, group_name
    if transport.refusal(tensor) is None:
        transport.all_reduce(tensor, out=tensor)
    else:
        communicator.dist_module.all_reduce(  # type: ignore[attr-defined]
            tensor, group=communicator.device_group
        )


def _all_reduce_fake(tensor: torch.Tensor, group_name: str) -> None:
    """Nothing that a compiler needs to know."""


direct_register_custom_op(
    op_name="host_channels_all_reduce",
    op_func=_all_reduce,
    mutates_args=["tensor"],
    fake_impl=_all_reduce_fake,
    dispatch_key="CPU",
)
