# SPDX-License-Identifier: Apache-2.0
"""Exchange DCP attention over b12x on named channels

Why: With decode context parallelism each rank attends to its part of the context
    and the parts are exchanged in every layer. Between GPUs without NVLink b12x
    does it in one kernel, weights included, over channels named by owner. Layers
    get a pool by their shapes when they are built, for `--dcp-comm-backend a2a`;
    FlashInfer's decode and MLA's combine and query gather use it, MLA rather
    than its direct workspaces. Callers that want the log-sum-exp back, and
    batches beyond the pool, take NCCL. VLLM_PCIE_ALLREDUCE_BACKEND chooses it.
Upstream: NCCL, or symmetric memory where GPUs have it, up to 0.33.0.
Drop-when: Upstream exchanges over channels that are named by owner.
"""

from series.verbs import (
    Edit,
    add_attribute,
    add_import,
    append_to,
    insert_above,
    insert_below,
    prepend_to,
    replace_body,
)

_COMMUNICATORS = "vllm/distributed/device_communicators"

ADDS = (
    f"{_COMMUNICATORS}/b12x_pcie_dcp.py",
    f"{_COMMUNICATORS}/dcp_channels.py",
    f"{_COMMUNICATORS}/dcp_geometry.py",
    f"{_COMMUNICATORS}/dcp_transports.py",
    f"{_COMMUNICATORS}/host_dcp.py",
)

_OPENS_CHANNELS = add_import(
    statement="from vllm.distributed.device_communicators.dcp_transports "
    "import open_dcp_channels"
)

_MLA_MANAGER: tuple[Edit, ...] = (
    _OPENS_CHANNELS,
    insert_below(
        function="MLADCPManager.__init__",
        statement="self.padded_num_heads",
        code="""
# Every rank builds this layer now. Then channels go before direct workspaces.
self.over_channels = not use_pcp and open_dcp_channels(
    self.group,
    vllm_config,
    heads_per_rank=num_heads,
    head_size=output_head_dim,
    query_head_size=query_head_dim,
    dtype=output_dtype,
)
""",
    ),
    prepend_to(
        function="MLADCPManager._init_combine",
        code="""
if self.over_channels:
    logger.info_once("Using graph channels for DCP of MLA.")
    return functools.partial(
        dcp_a2a_lse_reduce, cp_group=self.group, is_lse_base_on_e=is_lse_base_on_e
    )
""",
    ),
    prepend_to(
        function="MLADCPManager._init_query_gather",
        code="""
if self.over_channels:
    return self._gather_query
""",
    ),
    # Another way for the first of two steps.
    replace_body(
        function="MLADCPManager._gather_query",
        was="76e44a3a1f2170f6",
        code="""
channels = self.group.dcp_channels
if channels is not None and channels.takes_query(query):
    gathered = channels.gather_heads(query)
else:
    gathered = self.group.all_gather(query, dim=1)
if self.padded_num_heads is None:
    return gathered
return reserve_query_head_storage(gathered, self.padded_num_heads)
""",
    ),
)

EDITS: dict[str, tuple[Edit, ...]] = {
    "vllm/distributed/parallel_state.py": (
        add_import(
            statement="from vllm.distributed.device_communicators.dcp_channels "
            "import DcpChannels"
        ),
        add_attribute(
            cls="GroupCoordinator", statement="dcp_channels: DcpChannels | None = None"
        ),
    ),
    "vllm/v1/attention/ops/dcp_alltoall.py": (
        insert_above(
            function="dcp_a2a_lse_reduce",
            statement="lse_pack_dim",
            code="""
channels = None if return_lse else cp_group.dcp_channels
if channels is not None and channels.takes_partial(cp_attn_out, cp_attn_lse):
    # Channels know no lengths.
    mask_dcp_empty_shards_(cp_attn_lse, seq_lens, query_start_loc)
    return channels.lse_reduce(cp_attn_out, cp_attn_lse, is_lse_base_on_e)
""",
        ),
    ),
    "vllm/v1/attention/ops/dcp_utils.py": _MLA_MANAGER,
    "vllm/v1/attention/backends/flashinfer.py": (
        _OPENS_CHANNELS,
        append_to(
            function="FlashInferImpl.__init__",
            code="""
if dcp_a2a:
    # Every rank builds this layer now.
    open_dcp_channels(
        get_dcp_group(),
        vllm_config,
        heads_per_rank=num_heads,
        head_size=head_size,
        query_head_size=head_size,
        dtype=vllm_config.model_config.dtype,
    )
""",
        ),
    ),
}
