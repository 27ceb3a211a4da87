# SPDX-License-Identifier: Apache-2.0
"""A rank of a decode context parallel group, on the CPU or a GPU, and its sums.

What ranks exchange comes from vLLM's own entry points: ``MLADCPManager`` and
``dcp_a2a_lse_reduce``. What must come of it is worked out here, in float64.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.dcp_channels import DcpChannels
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.ops.dcp_utils import MLADCPManager

# A rank's heads, and their sizes as MLA has them: the query's are larger.
HEADS, HEAD_SIZE, QUERY_HEAD_SIZE = 2, 64, 96
MAX_TOKENS = 16

# Rounded once to 16 bits, from weights in float32.
CLOSE = {
    torch.bfloat16: {"rtol": 2**-8, "atol": 2e-5},
    torch.float16: {"rtol": 2**-11, "atol": 2e-5},
}


@dataclass(frozen=True)
class Rank:
    """What a test sees of a rank.

    Attributes:
        rank: Its number in the DCP group.
        world: The group's size.
        device: Its device.
        config: Of vLLM.
    """

    rank: int
    world: int
    device: torch.device
    config: VllmConfig

    @property
    def group(self) -> parallel_state.GroupCoordinator:
        """The DCP group."""
        return parallel_state.get_dcp_group()

    @property
    def channels(self) -> DcpChannels:
        """The group's channels; an AssertionError if no layer got any."""
        assert self.group.dcp_channels is not None
        return self.group.dcp_channels

    @property
    def ledger(self) -> Ledger:
        """The process's ledger."""
        assert parallel_state._LEDGER is not None
        return parallel_state._LEDGER

    def layer(
        self,
        dtype: torch.dtype = torch.bfloat16,
        *,
        base_e: bool = True,
        heads: int = HEADS,
        padded: int | None = None,
    ) -> MLADCPManager:
        """What an MLA layer builds; all ranks build theirs."""
        with set_default_torch_dtype(dtype):  # as models are loaded
            return MLADCPManager(
                self.config,
                self.device,
                num_heads=heads,
                query_head_dim=QUERY_HEAD_SIZE,
                output_head_dim=HEAD_SIZE,
                query_dtype=dtype,
                output_dtype=dtype,
                padded_num_heads=padded,
                is_lse_base_on_e=base_e,
                use_pcp=False,
            )

    def exchanged(self, layer: MLADCPManager, parts: "Parts") -> torch.Tensor:
        """What the layer makes of the parts; a copy, since it masks in place."""
        lens, starts = parts.lens, parts.starts
        return layer.combine(
            parts.laid_out(self.rank),
            parts.lses[self.rank].clone(),
            seq_lens=None if lens is None else lens[self.rank],
            query_start_loc=starts,
        )


@dataclass(frozen=True)
class Parts:
    """Attention over parts of the context, of all ranks.

    Attributes:
        name: What is special about them.
        outputs: ``[world, batch, heads, size]``.
        lses: ``[world, batch, heads]``.
        lens: Tokens of each sequence's context that a rank has: ``[world,
            sequences]``. None if nothing is said.
        starts: Where each sequence's tokens start in the batch, and the end.
        head_major: Whether heads stand one after another in memory.
    """

    name: str
    outputs: torch.Tensor
    lses: torch.Tensor
    lens: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    head_major: bool = False

    def laid_out(self, rank: int) -> torch.Tensor:
        """A rank's output as the layer gets it."""
        output = self.outputs[rank]
        if not self.head_major:
            return output.contiguous()
        batch, heads, size = output.shape
        room = output.new_empty(heads, batch + 3, size)  # a kernel's capacity
        room[:, :batch] = output.transpose(0, 1)
        return room[:, :batch].transpose(0, 1)

    def wanted(self, rank: int, *, base_e: bool) -> torch.Tensor:
        """What a rank must get, in float64."""
        share = self.outputs.shape[2] // self.outputs.shape[0]
        heads = slice(rank * share, (rank + 1) * share)
        outputs = self.outputs[:, :, heads].double()
        lses = self.lses[:, :, heads].double()
        counts = lses.isfinite() & self._has_context()
        lses = torch.where(counts, lses, -math.inf)
        weights = torch.pow(math.e if base_e else 2.0, lses - _finite(lses.amax(0)))
        weights = weights / weights.sum(0).clamp(min=1e-300)
        outputs = torch.where(counts.unsqueeze(-1), outputs, 0)
        return (weights.unsqueeze(-1) * outputs).sum(0)

    def _has_context(self) -> torch.Tensor:
        """Whether a rank's part of a token's context holds anything."""
        world, batch = self.outputs.shape[:2]
        has = torch.ones(world, batch, 1, dtype=torch.bool, device=self.lses.device)
        if self.lens is not None and self.starts is not None:
            has[:, int(self.starts[-1]) :] = False  # padding
            for n, (start, end) in enumerate(zip(self.starts[:-1], self.starts[1:])):
                has[:, start:end] = (self.lens[:, n] > 0)[:, None, None]
        return has


def _finite(largest: torch.Tensor) -> torch.Tensor:
    return torch.where(largest.isfinite(), largest, 0)


def parts_of_all_kinds(
    world: int, device: torch.device, dtype: torch.dtype
) -> list[Parts]:
    """Every kind of parts that a pool of this module's sizes exchanges."""
    generator = torch.Generator().manual_seed(3)

    def random(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (world, batch, world * HEADS, HEAD_SIZE)
        outputs = torch.randn(shape, generator=generator).to(device, dtype)
        return outputs, (torch.randn(shape[:-1], generator=generator) * 8).to(device)

    special, lses = random(6)
    lses[0, 0], lses[0, 1], lses[0, 2] = math.nan, math.inf, -math.inf
    special[0, :3] = math.nan  # an empty part holds whatever was there
    lses[:, 3] = -math.inf
    lses[1, 4] = math.nan
    masked = Parts("without", *random(7))
    lens = torch.ones(world, 3, dtype=torch.int32, device=device)
    lens[0, 0], lens[1, 1] = 0, 0
    starts = torch.tensor([0, 1, 4, 6], dtype=torch.int32, device=device)
    return [
        Parts("ordinary", *random(5)),
        Parts("one token", *random(1)),
        Parts("the largest batch", *random(MAX_TOKENS)),
        Parts("NaN, inf and -inf", special, lses),
        Parts("empty shards", masked.outputs, masked.lses, lens, starts),
        Parts("heads one after another", *random(5), head_major=True),
        Parts("one token, head after head", *random(1), head_major=True),
        Parts("LSE across", *_across(*random(5))),
    ]


def _across(
    outputs: torch.Tensor, lses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return outputs, lses.transpose(1, 2).contiguous().transpose(1, 2)


def wrong(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether a result is not what it should be, to the accuracy of its dtype."""
    return not torch.allclose(found.double(), wanted, **CLOSE[found.dtype])


@contextmanager
def decode_context_parallel(
    tensor: int,
    context: int,
    device: torch.device,
    backend: str,
    *,
    comm: str = "a2a",
) -> Iterator[Rank]:
    """vLLM's groups over the default process group, torn down afterwards."""
    os.environ.setdefault("VLLM_DCP_A2A_MAX_TOKENS", str(MAX_TOKENS))
    rank = torch.distributed.get_rank()
    config = VllmConfig()
    config.parallel_config.tensor_parallel_size = tensor
    config.parallel_config.decode_context_parallel_size = context
    config.parallel_config.dcp_comm_backend = comm
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            tensor, rank, local_rank=device.index or 0, backend=backend
        )
        parallel_state.initialize_model_parallel(
            tensor, decode_context_model_parallel_size=context, backend=backend
        )
        try:
            yield Rank(rank % context, context, device, config)
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
