# SPDX-License-Identifier: Apache-2.0
"""Runs the tests that need GPUs on whoever's machine, and keeps what came of it.

    python -m verification run [--out DIR] [FILE ...]    what `make test-gpu` runs
    python -m verification check RECEIPT ...             is each a whole receipt
    python -m verification page                          docs/verified.md, anew

Who imports whom, lowest first: ``receipt`` <- ``machine``, ``leftovers``,
``session`` <- ``run``; ``receipt`` <- ``claims``, ``junit``; pytest loads
``reporter``. Nothing of vLLM is imported but its NVML bindings.
"""
