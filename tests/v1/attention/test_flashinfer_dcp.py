# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's decode exchanges over channels. Its kernels are not needed for that."""

import os
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from tests import ranks
from tests.distributed.dcp_ranks import (
    HEAD_SIZE,
    HEADS,
    decode_context_parallel,
    parts_of_all_kinds,
    wrong,
)
from vllm.config import VllmConfig
from vllm.v1.attention.ops import dcp_alltoall

COVERS = ("vllm/v1/attention/backends/flashinfer.py",)

# Imports here, once, what every forked rank would import for itself.
VllmConfig()

CPU = torch.device("cpu")
DEADLINE = 60


def flashinfer_backend():
    """vLLM's module, where FlashInfer itself is not installed. In a forked rank."""
    for name in ("", ".decode", ".prefill", ".utils"):
        module = MagicMock(__spec__=ModuleSpec(f"flashinfer{name}", None))
        sys.modules[f"flashinfer{name}"] = module
    from vllm.v1.attention.backends import flashinfer

    flashinfer.can_use_trtllm_attention = lambda *args, **kwargs: False
    return flashinfer


def on_ranks(body, comm):
    """What ``body(rank, impl)`` gives on two ranks that built a layer."""

    def rank_body(rank, store):
        os.environ["VLLM_PCIE_ALLREDUCE_BACKEND"] = "host"
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=2
        )
        with decode_context_parallel(2, 2, CPU, "gloo", comm=comm) as here:
            backend = flashinfer_backend()
            here.config.model_config = SimpleNamespace(dtype=torch.bfloat16)
            impl = backend.FlashInferImpl(
                HEADS, HEAD_SIZE, 1.0, HEADS, None, None, "auto"
            )
            return body(here, impl)

    return ranks.values(2, rank_body, DEADLINE)


def test_its_decode_is_combined_over_channels():  # R-E2
    def body(here, impl):
        failed = []
        for parts in parts_of_all_kinds(2, CPU, torch.bfloat16):
            if parts.lens is None:  # FlashInfer says no lengths
                lse = parts.lses[here.rank].clone()
                output = parts.laid_out(here.rank)
                found = impl.dcp_combine(output, lse, here.group)
                if wrong(found, parts.wanted(here.rank, base_e=False)):
                    failed.append(parts.name)
        return failed, list(here.ledger.inventory())[1:]

    label = "host DCP all-to-all of dcp:0 (4 heads of 64, queries of 64, bfloat16, "
    for failed, (found,) in on_ranks(body, "a2a"):
        assert failed == [] and found.startswith(label)


def test_with_another_backend_of_dcp_it_has_none():  # R-A5
    def body(here, impl):
        return here.group.dcp_channels

    assert on_ranks(body, "ag_rs") == [None, None]


def test_its_prefill_wants_the_lse_back_and_takes_nccl(monkeypatch):  # R-E2
    def body(here, impl):
        def go(*args, **kwargs):
            raise ConnectionError

        monkeypatch.setattr(dcp_alltoall, "_dcp_a2a_send_recv_buffers", go)
        (parts, *_) = parts_of_all_kinds(2, CPU, torch.bfloat16)
        with pytest.raises(ConnectionError):
            impl.dcp_combine(
                parts.laid_out(here.rank),
                parts.lses[here.rank],
                here.group,
                return_lse=True,
            )
        return True

    assert on_ranks(body, "a2a") == [True, True]
