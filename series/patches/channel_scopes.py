# SPDX-License-Identifier: Apache-2.0
"""Let channels own their transports

Why: A name alone keeps no graph out of another's buffers. Model parallel groups
    now come with one ledger that owns whatever moves data over channels: it
    enters an owner's channel on all of them when graph_capture opens, can roll
    back what a disposable capture allocated, and closes them before the first
    group goes. A rank that does not come is told of within a deadline, not waited for.
    The host transport, off by default, gives the CPU platform such channels.
Upstream: Capture enters the communicators of TP and PP; nobody owns channels.
Drop-when: Upstream has an owner for the transports of a group.
"""

from series.edit import Edit
from series.verbs import (
    add_import,
    add_items,
    append_to,
    append_to_if,
    insert_before,
    pass_argument,
    prepend_to,
)

_CHANNELS = "vllm/distributed/graph_channels"
_COMMUNICATORS = "vllm/distributed/device_communicators"

ADDS = (
    f"{_CHANNELS}/deadline.py",
    f"{_CHANNELS}/demo.py",
    f"{_CHANNELS}/entry.py",
    f"{_CHANNELS}/ledger.py",
    f"{_CHANNELS}/membership.py",
    f"{_CHANNELS}/processes.py",
    f"{_CHANNELS}/switches.py",
    f"{_CHANNELS}/together.py",
    f"{_CHANNELS}/transport.py",
    f"{_CHANNELS}/vote.py",
    f"{_COMMUNICATORS}/channel_transports.py",
    f"{_COMMUNICATORS}/host_channels.py",
    f"{_COMMUNICATORS}/host_exchange.py",
    f"{_COMMUNICATORS}/host_graphs.py",
    f"{_COMMUNICATORS}/host_library.py",
    f"{_COMMUNICATORS}/host_lifecycle.py",
    f"{_COMMUNICATORS}/host_operations.py",
    f"{_COMMUNICATORS}/host_records.py",
    f"{_COMMUNICATORS}/host_reduction.py",
    f"{_COMMUNICATORS}/host_segments.py",
)

_OWNERSHIP = '''
_LEDGER: Ledger | None = None


def start_graph_channels() -> None:
    """Make the process's one ledger of graph channels. Local."""
    global _LEDGER
    if _LEDGER is None:
        _LEDGER = make_ledger()


def close_graph_channels() -> None:
    """Close the channels of all groups, before the first of them is destroyed.

    All ranks call it, when their graphs are gone; a rank that does not come is
    not waited for beyond the deadline. What cannot be closed stays owned.
    """
    global _LEDGER
    if _LEDGER is not None:
        _LEDGER.close()
        if not _LEDGER.inventory():
            _LEDGER = None
'''

_SWITCHES = {
    "VLLM_PCIE_ALLREDUCE_BACKEND": (
        'str = "cpp"',
        'lambda: os.getenv("VLLM_PCIE_ALLREDUCE_BACKEND", "cpp")',
    ),
    "VLLM_PCIE_ONESHOT_ALLREDUCE_MAX_SIZE": (
        'str = "64KB"',
        'lambda: os.getenv("VLLM_PCIE_ONESHOT_ALLREDUCE_MAX_SIZE", "64KB")',
    ),
    "VLLM_PCIE_ONESHOT_FUSED_ADD_RMS_NORM_MAX_SIZE": (
        'str = "84KB"',
        'lambda: os.getenv("VLLM_PCIE_ONESHOT_FUSED_ADD_RMS_NORM_MAX_SIZE", "84KB")',
    ),
    "VLLM_DCP_A2A_MAX_TOKENS": (
        "str | None = None",
        'lambda: os.getenv("VLLM_DCP_A2A_MAX_TOKENS")',
    ),
    "VLLM_GRAPH_CHANNELS_DEADLINE": (
        "str | None = None",
        'lambda: os.getenv("VLLM_GRAPH_CHANNELS_DEADLINE")',
    ),
    "VLLM_B12X_ALLOW_UNVALIDATED_DEVICE": (
        "str = '0'",
        'lambda: os.getenv("VLLM_B12X_ALLOW_UNVALIDATED_DEVICE", "0")',
    ),
}
_READERS = ", ".join(f'"{name}": {read}' for name, (_, read) in _SWITCHES.items())
# The backend decides which op is compiled in. The others act below that op.
_OUT_OF_THE_KEY = [name for name in _SWITCHES if not name.endswith("_BACKEND")]

EDITS: dict[str, tuple[Edit, ...]] = {
    "vllm/envs.py": (
        append_to_if(
            test="TYPE_CHECKING",
            code="\n".join(f"{name}: {kind}" for name, (kind, _) in _SWITCHES.items()),
        ),
        add_items(
            name="environment_variables",
            items=_READERS,
        ),
        add_items(
            function="compile_factors",
            name="ignored_factors",
            items=", ".join(f'"{name}"' for name in _OUT_OF_THE_KEY),
        ),
    ),
    "vllm/distributed/parallel_state.py": (
        add_import(
            statement="from vllm.distributed.device_communicators.channel_transports "
            "import make_ledger"
        ),
        add_import(
            statement="from vllm.distributed.graph_channels.ledger "
            "import Ledger, admission"
        ),
        insert_before(definition="graph_capture", code=_OWNERSHIP),
        prepend_to(function="initialize_model_parallel", code="start_graph_channels()"),
        prepend_to(function="destroy_model_parallel", code="close_graph_channels()"),
        pass_argument(
            function="graph_capture",
            call="channel_scope",
            argument="admit=admission(_LEDGER)",
        ),
    ),
    "vllm/distributed/device_communicators/cpu_communicator.py": (
        add_import(
            statement="from vllm.distributed.device_communicators.channel_transports "
            "import host_all_reduce"
        ),
        append_to(
            function="CpuCommunicator.__init__",
            code="self.host_channels = host_all_reduce(self)",
        ),
        prepend_to(
            function="CpuCommunicator.all_reduce",
            code="""
if self.host_channels is not None:
    torch.ops.vllm.host_channels_all_reduce(input_, self.unique_name)
    return input_
""",
        ),
    ),
}
