# SPDX-License-Identifier: Apache-2.0
"""The patches of the series, one module each, in the order they apply."""

ORDER = (
    "name_graph_owners",
    "channel_scopes",
    "b12x_all_reduce",
    "b12x_dcp",
    "disposable_profiling",
    "ordered_teardown",
    "say_beforehand",
)
