# SPDX-License-Identifier: Apache-2.0
"""Lands the patch series in a pinned vLLM release and builds a wheel of it."""
