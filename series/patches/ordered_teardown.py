# SPDX-License-Identifier: Apache-2.0
"""Tear down in order

Why: Peers' memory must not be unmapped while a graph may use it, nor after the group
    is gone that its collective close runs on. Now both runners drop the graphs of
    all owners first; the channels of all groups are closed before the first group
    is destroyed, and a group's communicator goes before the groups under it. A
    close is collective only where it can be: the executor lets idle workers return
    from their loops, and only then do they close. After an exception, a signal or
    the death of the executor nothing collective is begun. A worker whose peers
    may wait for it, or whose device waits for a peer, ends itself within seconds.
    A server that is told to end while its engine starts does so.
    What ends or restarts ranks in ways of its own is refused at start.
Upstream: Groups go before their communicators (since 0.30.0 after them), graphs
    after both, and NCCL waits up to 5 s for these. A worker's teardown is the
    same after a stop, an exception and a signal. A server that waits for its
    engine core to start drops SIGTERM, and heeds no Ctrl-C.
Drop-when: Upstream tears down graphs, communicators and groups in this order, and
    tells its workers whether their peers take part.
"""

from series.verbs import (
    Edit,
    add_attribute,
    add_import,
    append_to,
    insert_before,
    insert_below,
    prepend_to,
)

_CHANNELS = "vllm/distributed/graph_channels"

ADDS = (
    "vllm/entrypoints/interrupted_start.py",
    f"{_CHANNELS}/combinations.py",
    "vllm/v1/executor/orderly_stop.py",
    "vllm/v1/executor/worker_teardown.py",
    "vllm/v1/worker/graph_teardown.py",
)

_ABANDON = '''
def abandon_graph_channels(reason: str) -> None:
    """Begin nothing collective on graph channels from now on. Local."""
    if _LEDGER is not None:
        _LEDGER.abandon(reason)


def ranks_are_lost() -> bool:
    """Whether a rank missed a deadline. Local.

    Then groups are not destroyed and the device is not waited for: either may
    never end. The process has to.
    """
    return _LEDGER is not None and _LEDGER.lost is not None
'''

_DROPS_GRAPHS = add_import(
    statement="from vllm.v1.worker.graph_teardown import drop_graphs"
)

EDITS: dict[str, tuple[Edit, ...]] = {
    "vllm/distributed/parallel_state.py": (
        insert_before(definition="graph_capture", code=_ABANDON),
        prepend_to(
            function="GroupCoordinator.destroy",
            code="""
# What a communicator closes may need the groups.
communicator, self.device_communicator = self.device_communicator, None
if communicator is not None:
    communicator.destroy()
""",
        ),
        insert_below(
            function="destroy_model_parallel",
            statement="close_graph_channels()",
            code="""
if ranks_are_lost():
    return
""",
        ),
        prepend_to(
            function="destroy_distributed_environment",
            code="""
if ranks_are_lost():
    return
""",
        ),
        insert_below(
            function="cleanup_dist_env_and_memory",
            statement="destroy_distributed_environment()",
            code="""
if ranks_are_lost():
    return
""",
        ),
        prepend_to(
            function="checkpoint_prepare_distributed_state",
            code="refuse_checkpoints()",
        ),
        add_import(
            statement="from vllm.distributed.graph_channels.combinations "
            "import refuse_checkpoints"
        ),
    ),
    "vllm/config/vllm.py": (
        prepend_to(
            function="VllmConfig.__post_init__",
            code="""
if envs.VLLM_PCIE_ALLREDUCE_BACKEND != "cpp":
    # lazy import: only where it is asked for
    from vllm.distributed.graph_channels.combinations import refuse_combinations

    refuse_combinations(self)
""",
        ),
    ),
    "vllm/v1/worker/gpu_model_runner.py": (
        _DROPS_GRAPHS,
        prepend_to(function="GPUModelRunner.shutdown", code="drop_graphs(self)"),
    ),
    "vllm/v1/worker/gpu/model_runner.py": (
        _DROPS_GRAPHS,
        prepend_to(function="GPUModelRunner.shutdown", code="drop_graphs(self)"),
    ),
    "vllm/v1/executor/multiproc_executor.py": (
        add_import(
            statement="from vllm.v1.executor.worker_teardown "
            "import begin_teardown, end_teardown, limit_teardown"
        ),
        add_import(
            statement="from vllm.v1.executor.orderly_stop "
            "import RETURN_FROM_WORK, let_workers_return"
        ),
        insert_below(
            function="MultiprocExecutor.shutdown",
            statement="self.shutting_down = True",
            code="let_workers_return(self)",
        ),
        insert_below(
            function="WorkerProc.worker_busy_loop",
            statement="method, args, kwargs, output_rank",
            code="""
if method == RETURN_FROM_WORK:
    self.handle_output(None)
    return
""",
        ),
        add_attribute(cls="WorkerProc", statement="returned_from_work = False"),
        insert_below(
            function="WorkerProc.worker_main",
            statement="worker.worker_busy_loop()",
            code="worker.returned_from_work = True",
        ),
        # What the signal raises may be held up, or lost, in the step under way.
        insert_below(
            function="WorkerProc.worker_main.<locals>.signal_handler",
            statement="shutdown_requested.set()",
            code="limit_teardown()",
        ),
        # The loop may be in a step that never ends, and the executor may be dead.
        insert_below(
            function="WorkerProc.monitor_death_pipe.<locals>.death_pipe_monitor",
            statement="shutdown_requested.set()",
            code="limit_teardown()",
        ),
        prepend_to(
            function="WorkerProc.shutdown",
            code="begin_teardown(in_order=self.returned_from_work)",
        ),
        append_to(function="WorkerProc.shutdown", code="end_teardown()"),
    ),
    "vllm/entrypoints/openai/api_server.py": (
        add_import(
            statement="from vllm.entrypoints.interrupted_start "
            "import end_start_at_signals"
        ),
        insert_below(
            function="run_server",
            statement="signal.signal",
            code="end_start_at_signals()",
        ),
    ),
    # In one process with its caller: there is no busy loop, and no other way to end.
    "vllm/v1/executor/uniproc_executor.py": (
        add_import(
            statement="from vllm.v1.executor.worker_teardown "
            "import begin_teardown_in_process"
        ),
        prepend_to(
            function="UniProcExecutor.shutdown",
            code="""
if not begin_teardown_in_process():
    return
""",
        ),
    ),
}
