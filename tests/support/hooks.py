# SPDX-License-Identifier: Apache-2.0
"""The head of a folder's 1/model.py, and the error messages about its hooks."""

HEAD = """import hf_triton


class TritonPythonModel(hf_triton.TritonPythonModel):
"""
FAILED = "{} of the folder's own 1/model.py failed ({} at model.py:{})"
WRONG = "{} must return {}, got {}: see the folder's own 1/model.py"
NOTHING = "{} must return {}, got None: is a return missing in the folder's own 1/model.py?"
