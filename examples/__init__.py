# SPDX-License-Identifier: Apache-2.0
"""What to do with a build: `make run` runs serve_two_ranks."""
