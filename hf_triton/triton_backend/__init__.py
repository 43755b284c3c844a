# SPDX-License-Identifier: Apache-2.0
"""Our side of Triton's Python backend: the only package that imports triton_python_backend_utils."""
