# SPDX-License-Identifier: Apache-2.0
"""Names for the owners of CUDA graphs, and the channels they communicate on."""
