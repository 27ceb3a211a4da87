# SPDX-License-Identifier: Apache-2.0
"""Say beforehand what this machine can do

Why: A switch with a value that is refused was refused by the workers, a minute or
    two into `vllm serve` and below their tracebacks. `vllm serve` refuses it in one
    line, and whatever else makes a configuration where that checks its
    environment, before a model is looked for. Where tensor parallelism has one
    rank, a backend that was chosen does nothing, and that is said there. And `python
    -m vllm.distributed.graph_channels doctor` tries each backend as an engine would,
    without one, and says why not.
Upstream: `validate_environ` warns of names that are unknown; values are not looked at.
Drop-when: Upstream checks the values of its switches when a configuration is made,
    and says what its all-reduce backends lack.
"""

from series.edit import Edit
from series.verbs import add_import, insert_above, insert_below

_CHANNELS = "vllm/distributed/graph_channels"

ADDS = (
    f"{_CHANNELS}/__main__.py",
    f"{_CHANNELS}/doctor.py",
    f"{_CHANNELS}/machine.py",
    f"{_CHANNELS}/trial.py",
)

EDITS: dict[str, tuple[Edit, ...]] = {
    "vllm/engine/arg_utils.py": (
        add_import(
            statement="from vllm.distributed.graph_channels.switches "
            "import check_switches, tell_if_unused"
        ),
        insert_below(
            function="EngineArgs.create_engine_config",
            statement="envs.validate_environ",
            code="check_switches()\ntell_if_unused(self.tensor_parallel_size)",
        ),
    ),
    "vllm/entrypoints/cli/serve.py": (
        add_import(
            statement="from vllm.distributed.graph_channels.switches "
            "import exit_on_bad_switches"
        ),
        insert_above(
            function="ServeSubcommand.validate",
            statement="validate_parsed_serve_args",
            code="exit_on_bad_switches()",
        ),
    ),
}
