# SPDX-License-Identifier: Apache-2.0
"""Leave nothing of profiling captures behind

Why: The V1 runner captures throwaway graphs to learn how much memory graphs take.
    Their channels would stay for the life of the process, and nobody would count
    the channels that serve. Profiling captures now run between a checkpoint and
    a rollback, on channels of their own: made before the first memory sample,
    freed when the graphs and their pools are gone and before the profiling KV
    cache is, after a failure too. Channels that serve are made once, at the end
    of determine_available_memory on both runners, and come off what it returns.
    If a rank does not come to the rollback, its device may never be idle again:
    nothing waits for it, and the worker ends once its error is reported, since
    the executor would wait for the answer of the rank that is stuck.
Upstream: Profiling frees graphs and KV cache; communicators are not told.
Drop-when: Upstream's profiling tells communicators when its graphs are gone, and
    its KV sizing asks them for the bytes that they will hold.
"""

from series.edit import Edit
from series.verbs import (
    add_decorator,
    add_import,
    insert_above,
    insert_before,
    insert_below,
)

ADDS = (
    "vllm/v1/executor/lost_ranks.py",
    "vllm/v1/worker/graph_channels.py",
    "vllm/v1/worker/graph_owners.py",
)

_HELPERS = "from vllm.v1.worker.graph_channels import "
_PROFILE = "GPUModelRunner.profile_cudagraph_memory"

_LEDGER_OF_THE_PROCESS = '''
def get_graph_channels() -> Ledger | None:
    """The process's ledger, from the first model parallel group to the last."""
    return _LEDGER
'''

EDITS: dict[str, tuple[Edit, ...]] = {
    "vllm/distributed/parallel_state.py": (
        insert_before(definition="graph_capture", code=_LEDGER_OF_THE_PROCESS),
    ),
    "vllm/v1/worker/gpu_model_runner.py": (
        add_import(statement=_HELPERS + "DisposableCapture"),
        # Before the wrappers' pools are swapped: it may refuse.
        insert_above(
            function=_PROFILE,
            statement="profiling_pool",
            code="disposable_capture = DisposableCapture(self)",
        ),
        # Inside the try: what it makes is rolled back if it fails.
        insert_above(
            function=_PROFILE,
            statement="set_cudagraph_capturing_enabled(True)",
            code="disposable_capture.prepare()",
        ),
        # Graphs are gone and pools restored here. What follows may wait for the
        # device, and is not reached if a rank was lost.
        insert_above(
            function=_PROFILE,
            statement="self.maybe_remove_all_loras(self.lora_config)",
            code="disposable_capture.roll_back()",
        ),
    ),
    "vllm/v1/worker/gpu_worker.py": (
        add_import(statement=_HELPERS + "reserves_graph_channels"),
        add_decorator(
            function="Worker.determine_available_memory",
            decorator="reserves_graph_channels",
        ),
    ),
    "vllm/v1/executor/multiproc_executor.py": (
        add_import(
            statement="from vllm.v1.executor.lost_ranks import end_process_if_not_heard"
        ),
        insert_below(
            function="WorkerProc.worker_busy_loop",
            statement="logger.exception",
            code="end_process_if_not_heard(method)",
        ),
    ),
}
