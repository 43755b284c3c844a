# SPDX-License-Identifier: Apache-2.0
import hf_triton


class TritonPythonModel(hf_triton.StreamDoor):
    """Adds nothing: hf_triton/stream_door/ does the rest."""
