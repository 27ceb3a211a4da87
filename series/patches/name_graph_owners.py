# SPDX-License-Identifier: Apache-2.0
"""Name every graph owner

Why: A graph's communication channel must belong to whoever captured the graph.
    The only hint a communicator gets today is the CUDA stream, whose handle is
    recycled, shared between owners and different on each rank. Give every
    capture a `channel_id` that names its owner and phase, the same on all
    ranks, and hand it down to the communicators. Owners that capture inside
    another's scope (the V1 draft and encoder) say so with `owner_scope`. No
    communicator acts on the name yet.
Upstream: graph_capture takes a device and a stream only, up to 0.33.0.
Drop-when: Upstream's graph_capture takes the name of the graph's owner.
"""

from series.verbs import (
    Edit,
    add_attribute,
    add_decorator,
    add_import,
    add_parameter,
    enclose,
    enter_context,
    extend_docstring,
    pass_argument,
)

ADDS = (
    "vllm/distributed/graph_channels/__init__.py",
    "vllm/distributed/graph_channels/identity.py",
    "vllm/distributed/graph_channels/scope.py",
    "vllm/distributed/graph_channels/trace.py",
)

_SCOPE = "from vllm.distributed.graph_channels.scope import owner_scope"
_IDENTITY = "from vllm.distributed.graph_channels.identity import "
_PARAMETER = "channel_id: ChannelId | None = None"
_FORWARD = "channel_id=channel_id"
_GPU = "vllm/v1/worker/gpu"


def _names(*names: str) -> Edit:
    return add_import(statement=_IDENTITY + ", ".join(names))


_COMMUNICATORS: dict[str, tuple[Edit, ...]] = {
    "vllm/distributed/parallel_state.py": (
        _names("ChannelId"),
        add_import(
            statement="from vllm.distributed.graph_channels.scope import channel_scope"
        ),
        add_parameter(function="GroupCoordinator.graph_capture", parameter=_PARAMETER),
        pass_argument(
            function="GroupCoordinator.graph_capture",
            call="ca_comm.capture",
            argument=_FORWARD,
        ),
        add_parameter(function="graph_capture", parameter=_PARAMETER),
        # Only the tensor parallel group reduces inside graphs: pipeline
        # stages own no channel.
        pass_argument(
            function="graph_capture",
            call="get_tp_group().graph_capture",
            argument=_FORWARD,
        ),
        enter_context(
            function="graph_capture",
            beside="get_tp_group().graph_capture",
            context="channel_scope(channel_id)",
        ),
        extend_docstring(
            function="graph_capture",
            text="""
``channel_id`` names the owner and phase of the graphs, and thereby the
communication channel they use. All ranks of the tensor parallel group
pass the same one.""",
        ),
    ),
    "vllm/distributed/device_communicators/custom_all_reduce.py": (
        _names("ChannelId"),
        add_parameter(function="CustomAllreduce.capture", parameter=_PARAMETER),
        extend_docstring(
            function="CustomAllreduce.capture",
            text="""
``channel_id`` names the owner of the graph. It has no effect here:
these buffers are registered by address, graph by graph.""",
        ),
    ),
}

_V1_RUNNER: dict[str, tuple[Edit, ...]] = {
    "vllm/v1/worker/gpu_model_runner.py": (
        _names("ChannelId", "Owner", "Phase"),
        add_import(statement=_SCOPE),
        pass_argument(
            function="GPUModelRunner.profile_cudagraph_memory",
            call="graph_capture",
            argument="channel_id=ChannelId(Owner.TARGET, Phase.PROFILE)",
        ),
        pass_argument(
            function="GPUModelRunner.capture_model",
            call="graph_capture",
            argument="channel_id=ChannelId(Owner.TARGET, Phase.PRODUCTION)",
        ),
        # Around the calls: on V2 the same manager has a scope of its own.
        *(
            enclose(
                function=f"GPUModelRunner.{function}",
                statement=f"{manager}.capture",
                context=f"owner_scope(Owner.ENCODER, by={manager})",
            )
            for function, manager in (
                ("profile_cudagraph_memory", "encoder_cudagraph_manager"),
                ("capture_model", "self.encoder_cudagraph_manager"),
            )
        ),
    ),
}


def _draft(cls: str) -> tuple[Edit, ...]:
    """What makes a proposer's dummy runs a draft's, where a scope is open.

    On the class and not around its callers: the runner calls it from several
    places, for captures and for dummy batches.
    """
    return (
        _names("Owner"),
        add_import(statement=_SCOPE),
        add_decorator(
            function=f"{cls}.dummy_run", decorator="owner_scope(Owner.DRAFT)"
        ),
    )


_V1_DRAFTS: dict[str, tuple[Edit, ...]] = {
    "vllm/v1/spec_decode/llm_base_proposer.py": _draft("SpecDecodeBaseProposer"),
    "vllm/v1/spec_decode/dflash.py": _draft("DFlashProposer"),
    "vllm/v1/spec_decode/extract_hidden_states.py": _draft(
        "ExtractHiddenStatesProposer"
    ),
}


def _manager(cls: str) -> tuple[Edit, ...]:
    """A subclass of CudaGraphManager hands the name to its parent's capture."""
    return (
        add_parameter(function=f"{cls}.capture", parameter=_PARAMETER),
        pass_argument(
            function=f"{cls}.capture", call="super().capture", argument=_FORWARD
        ),
    )


_V2_MANAGERS: dict[str, tuple[Edit, ...]] = {
    f"{_GPU}/cudagraph_utils.py": (
        _names("ChannelId"),
        add_parameter(function="CudaGraphManager.capture", parameter=_PARAMETER),
        extend_docstring(
            function="CudaGraphManager.capture",
            text="    channel_id: Who owns the graphs; the same on all ranks.",
        ),
        pass_argument(
            function="CudaGraphManager.capture",
            call="graph_capture",
            argument=_FORWARD,
        ),
        *_manager("ModelCudaGraphManager"),
    ),
    f"{_GPU}/spec_decode/autoregressive/cudagraph_utils.py": (
        _names("ChannelId"),
        *_manager("SpeculatorCudaGraphManager"),
    ),
    f"{_GPU}/spec_decode/dflash/cudagraph.py": (
        _names("ChannelId"),
        *_manager("DFlashCudaGraphManager"),
    ),
}


def _production(function: str, call: str, owner: str) -> Edit:
    return pass_argument(
        function=function,
        call=call,
        argument=f"channel_id=ChannelId({owner}, Phase.PRODUCTION)",
    )


_V2_OWNERS: dict[str, tuple[Edit, ...]] = {
    f"{_GPU}/model_runner.py": (
        _names("ChannelId", "Owner", "Phase"),
        _production(
            "GPUModelRunner.capture_model",
            "self.cudagraph_manager.capture",
            "Owner.TARGET",
        ),
    ),
    f"{_GPU}/mm/encoder_runner.py": (
        _names("ChannelId", "Owner", "Phase"),
        _production("EncoderRunner.capture", "graph_capture", "Owner.ENCODER"),
    ),
    f"{_GPU}/spec_decode/autoregressive/speculator.py": (
        _names("ChannelId", "Owner", "Phase"),
        _production(
            "AutoRegressiveSpeculator.capture",
            "self.prefill_cudagraph_manager.capture",
            "Owner.DRAFT_PREFILL",
        ),
        _production(
            "AutoRegressiveSpeculator.capture",
            "self.decode_cudagraph_manager.capture",
            "Owner.DRAFT_DECODE",
        ),
    ),
    f"{_GPU}/spec_decode/multi_module_mtp/speculator.py": (
        _names("ChannelId", "Owner", "Phase"),
        _production(
            "MultiModuleMTPSpeculator.capture",
            "self.cudagraph_manager.capture",
            "Owner.MULTI_MODULE_MTP",
        ),
    ),
    # DFlash, DFlash2 and DSpark share one manager attribute and one capture:
    # the class says which owner it is.
    f"{_GPU}/spec_decode/dflash/speculator.py": (
        _names("ChannelId", "Owner", "Phase"),
        add_attribute(
            cls="DFlashSpeculator", statement="graph_owner = Owner.DRAFT_QUERY"
        ),
        _production(
            "DFlashSpeculator.capture",
            "self.query_cudagraph_manager.capture",
            "self.graph_owner",
        ),
    ),
    f"{_GPU}/spec_decode/dspark/speculator.py": (
        _names("Owner"),
        add_attribute(cls="DSparkSpeculator", statement="graph_owner = Owner.DSPARK"),
    ),
}

EDITS: dict[str, tuple[Edit, ...]] = {
    **_COMMUNICATORS,
    **_V1_RUNNER,
    **_V1_DRAFTS,
    **_V2_MANAGERS,
    **_V2_OWNERS,
}
