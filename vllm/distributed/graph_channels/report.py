# SPDX-License-Identifier: Apache-2.0
"""The one table that says what graph channels there are, and who uses them."""

from collections.abc import Sequence

from vllm.distributed import parallel_state
from vllm.distributed.graph_channels.identity import ChannelId
from vllm.distributed.graph_channels.membership import Usage
from vllm.logger import init_logger

logger = init_logger(__name__)

_HEADINGS = ("channel", "owner", "bytes", "launches recorded")


def report_graph_channels() -> None:
    """Log what channels the groups of this process have, once captures are done.

    Local. All ranks of a group are alike, and so are the DCP groups of one tensor
    parallel group: who is first in all of its groups says it. A process without
    channels says nothing.
    """
    ledger = parallel_state._LEDGER
    usages = () if ledger is None else ledger.usage()
    if all(usage.rank == 0 for usage in usages):
        for usage in usages:
            logger.info("%s", table(usage))


def table(usage: Usage) -> str:
    """A transport's channels, one a line, and their bytes in total on a rank."""
    rows = [
        (
            str(name),
            name.owner.value if isinstance(name, ChannelId) else "eager",
            f"{size:,}",
            str(usage.recorded.get(name, 0)),
        )
        for name, size in usage.channels.items()
    ]
    launches = sum(usage.recorded.values())
    total = ("total a rank", "", f"{sum(usage.channels.values()):,}", str(launches))
    lines = [_HEADINGS, *rows, total]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    title = f"Graph channels: {usage.label}, {usage.ranks} ranks"
    return "\n".join([title, *(_line(cells, widths) for cells in lines)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    channel, owner, size, recorded = cells
    return (
        f"  {channel:<{widths[0]}}  {owner:<{widths[1]}}  {size:>{widths[2]}}"
        f"  {recorded:>{widths[3]}}"
    )
