# SPDX-License-Identifier: Apache-2.0
"""What attention layers exchange over the channels of their DCP group.

A ``GroupCoordinator`` of decode context parallelism holds one ``DcpChannels``
once a layer asked for channels. Whatever no pool of it takes goes the way that
it goes without.
"""

from typing import Protocol

import torch

from vllm.distributed.device_communicators.channel_transports import Place
from vllm.distributed.device_communicators.dcp_geometry import DcpGeometry
from vllm.distributed.graph_channels.transport import Transport


class DcpTransport(Transport, Protocol):
    """A transport of one geometry.

    Attributes:
        query_dtypes: What ``gather_heads`` takes.
    """

    query_dtypes: tuple[torch.dtype, ...]

    def on_main_stream(self) -> bool:
        """Whether what is launched here may use a channel; alike on all ranks."""

    def dcp_lse_reduce_scatter(
        self, out_partial: torch.Tensor, lse: torch.Tensor, is_lse_base_on_e: bool
    ) -> torch.Tensor:
        """Combine attention over parts of the context; each rank gets its heads."""

    def gather_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put every rank's heads side by side, in the order of ranks."""


class DcpChannels:
    """The transports of one group, by what they exchange.

    Args:
        place: Where they are made. One for the whole group, since its ranks count
            their votes there.

    Attributes:
        place: As given.
        admitted: Whether all ranks were found able to use b12x.
        refused: Whether this group goes without, for good.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.admitted = self.refused = False
        self._transports: dict[DcpGeometry, DcpTransport | None] = {}

    def knows(self, geometry: DcpGeometry) -> bool:
        """Whether a layer asked for it before."""
        return geometry in self._transports

    def serves(self, geometry: DcpGeometry) -> bool:
        """Whether there is a transport for it."""
        return self._transports.get(geometry) is not None

    def add(self, geometry: DcpGeometry, transport: DcpTransport | None) -> None:
        """Keep what was made; None if there can be none. All ranks, in one order."""
        self._transports[geometry] = transport

    def takes_partial(self, partial: torch.Tensor, lse: torch.Tensor) -> bool:
        """Whether ``lse_reduce`` takes tensors; alike on all ranks."""
        transport = self._for_partial(partial, lse)
        return transport is not None and transport.on_main_stream()

    def lse_reduce(
        self, partial: torch.Tensor, lse: torch.Tensor, is_lse_base_on_e: bool
    ) -> torch.Tensor:
        """Combine attention over parts of the context. All ranks call it.

        Args:
            partial: Of this rank's part: ``[batch, heads, head_size]``.
            lse: The log-sum-exp of its scores, ``[batch, heads]``. A part counts
                for nothing where it is NaN or infinite.
            is_lse_base_on_e: Whether to base e; else to base 2.

        Returns:
            This rank's heads, ``[batch, heads / ranks, head_size]``.

        Raises:
            NoScopeError: A graph is being captured, and no scope is open.
        """
        transport = self._for_partial(partial, lse)
        assert transport is not None, "asked without takes_partial()"
        return transport.dcp_lse_reduce_scatter(partial, lse, is_lse_base_on_e)

    def takes_query(self, query: torch.Tensor) -> bool:
        """Whether ``gather_heads`` takes a query; alike on all ranks."""
        transport = self._for_query(query)
        return transport is not None and transport.on_main_stream()

    def gather_heads(self, query: torch.Tensor) -> torch.Tensor:
        """Put every rank's heads side by side. All ranks call it.

        Args:
            query: Of this rank's heads: ``[batch, heads / ranks, size]``.

        Returns:
            ``[batch, heads, size]``.

        Raises:
            NoScopeError: A graph is being captured, and no scope is open.
        """
        transport = self._for_query(query)
        assert transport is not None, "asked without takes_query()"
        return transport.gather_heads(query)

    def _for_partial(
        self, partial: torch.Tensor, lse: torch.Tensor
    ) -> DcpTransport | None:
        for geometry, transport in self._transports.items():
            if transport is not None and geometry.takes_partial(partial, lse):
                return transport
        return None

    def _for_query(self, query: torch.Tensor) -> DcpTransport | None:
        world = self.place.group.size
        for geometry, transport in self._transports.items():
            if (
                transport is not None
                and query.dtype in transport.query_dtypes
                and geometry.takes_query(query, world)
            ):
                return transport
        return None
