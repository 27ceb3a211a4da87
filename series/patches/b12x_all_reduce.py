# SPDX-License-Identifier: Apache-2.0
"""Reduce over b12x on named channels

Why: Between GPUs without NVLink, b12x's one-shot all-reduce is made for the sizes
    of decoding, but its channels have to be told apart by owner. The CUDA
    communicator gets it as its first backend, with every owner's graphs on a
    channel of their own; large tensors take NCCL. The few places that reduce on
    a second stream say so, since a channel serves one stream. Beside it, the
    custom all-reduce no longer communicates after a failed capture, and its
    finalizer is silent. Off by default: VLLM_PCIE_ALLREDUCE_BACKEND=b12x.
Upstream: No b12x all-reduce up to 0.33.0.
Drop-when: Upstream reduces over channels that are named by owner.
"""

from series.verbs import (
    Edit,
    add_decorator,
    add_import,
    add_method,
    insert_above,
    insert_below,
    prepend_to,
    replace_body,
)

_CHANNELS = "vllm/distributed/graph_channels"
_COMMUNICATORS = "vllm/distributed/device_communicators"

ADDS = (
    f"{_CHANNELS}/report.py",
    f"{_CHANNELS}/stream_roles.py",
    f"{_COMMUNICATORS}/b12x_channels.py",
    f"{_COMMUNICATORS}/b12x_gate.py",
    f"{_COMMUNICATORS}/b12x_pcie_all_reduce.py",
    f"{_COMMUNICATORS}/b12x_peers.py",
    f"{_COMMUNICATORS}/b12x_transports.py",
    f"{_COMMUNICATORS}/packs.py",
)

_FUSED = '''
def all_reduce_add_rms_norm(
    self,
    input_: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Reduce, add a residual and apply RMSNorm, in one kernel.

    All ranks call it with equal shapes. Returns the normalised rows and the
    sum before; None, and nothing is done, if no backend takes such tensors.
    """
    comm = self.b12x_comm
    if comm is None or not comm.should_fuse_add_rms_norm(input_, residual, weight):
        return None
    return comm.all_reduce_add_rms_norm(input_, residual, weight, epsilon)
'''

_CUDA_COMMUNICATOR: tuple[Edit, ...] = (
    # Before PyNccl's first collective, which has no deadline; ca_comm stays None.
    insert_below(
        function="CudaCommunicator.__init__",
        statement="self.use_aiter_allreduce",
        code="""
self.b12x_comm = None
if envs.VLLM_PCIE_ALLREDUCE_BACKEND == "b12x":
    # lazy import: only where it is asked for
    from vllm.distributed.device_communicators.b12x_transports import (
        b12x_all_reduce,
    )

    self.b12x_comm = b12x_all_reduce(self, custom_all_reduce=use_custom_allreduce)
    use_custom_allreduce = False
""",
    ),
    insert_below(
        function="CudaCommunicator._log_all_reduce_backend_selection",
        statement="enabled_ar_backends",
        code="""
if self.b12x_comm is not None:
    all_potential_ar_backends.insert(0, "B12X_PCIE")
    enabled_ar_backends.append("B12X_PCIE")
""",
    ),
    prepend_to(
        function="CudaCommunicator.all_reduce",
        code="""
b12x_comm = self.b12x_comm
if b12x_comm is not None and b12x_comm.should_all_reduce(input_):
    return b12x_comm.all_reduce(input_)
""",
    ),
    add_method(cls="CudaCommunicator", code=_FUSED),
    # The ledger has closed its channels by then.
    prepend_to(
        function="CudaCommunicator.destroy",
        code="""
self.b12x_comm = None
if self.ca_comm is not None:
    try:
        self.ca_comm.close()
    except Exception:  # what follows has to go all the same
        logger.exception("Custom all-reduce was not closed")
""",
    ),
)

_CUSTOM_ALL_REDUCE: tuple[Edit, ...] = (
    replace_body(
        function="CustomAllreduce.capture",
        was="4dc3ca990d35b3a8",
        code="""
outer, self._IS_CAPTURING = self._IS_CAPTURING, True
try:
    yield
finally:
    self._IS_CAPTURING = outer
# Collective, so not for a rank whose capture raised: its peers may not come.
if not self.disabled:
    self.register_graph_buffers()
""",
    ),
    replace_body(
        function="CustomAllreduce.__del__",
        was="29c7a96288f4e31e",
        code="""
try:
    self.close()
except Exception:
    return  # half-built, or at interpreter exit: there is nobody to tell
""",
    ),
)


def _marked(function: str, role: str) -> tuple[Edit, ...]:
    """What marks a function that communicates on another stream than the main one."""
    return (
        add_import(
            statement="from vllm.distributed.graph_channels.stream_roles "
            "import auxiliary_stream"
        ),
        add_decorator(function=function, decorator=f'auxiliary_stream("{role}")'),
    )


def _reported(function: str) -> tuple[Edit, ...]:
    return (
        add_import(
            statement="from vllm.distributed.graph_channels.report "
            "import report_graph_channels"
        ),
        insert_above(
            function=function,
            statement="set_random_seed",
            code="report_graph_channels()",
        ),
    )


EDITS: dict[str, tuple[Edit, ...]] = {
    f"{_COMMUNICATORS}/cuda_communicator.py": _CUDA_COMMUNICATOR,
    f"{_COMMUNICATORS}/custom_all_reduce.py": _CUSTOM_ALL_REDUCE,
    "vllm/model_executor/layers/fused_moe/runner/shared_experts.py": _marked(
        "SharedExperts._run_in_aux_stream", "shared experts"
    ),
    "vllm/models/kimi_k3/nvidia/latent_moe_runner.py": _marked(
        "LatentMoERunner._overlap_allreduce_tail", "the overlapped tail"
    ),
    "vllm/v1/worker/gpu_ubatch_wrapper.py": (
        *_marked(
            "UBatchWrapper._run_ubatches.<locals>._ubatch_thread", "a micro-batch"
        ),
        add_decorator(
            function="UBatchWrapper._capture_ubatches.<locals>._capture_ubatch_thread",
            decorator='auxiliary_stream("a micro-batch")',
        ),
    ),
    "vllm/v1/worker/gpu_worker.py": _reported("Worker.compile_or_warm_up_model"),
    "vllm/v1/worker/cpu_worker.py": _reported("CPUWorker.compile_or_warm_up_model"),
}
