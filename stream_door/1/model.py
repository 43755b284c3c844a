# SPDX-License-Identifier: Apache-2.0
import hf_triton


class TritonPythonModel(hf_triton.StreamDoor):
    """Nothing of its own: hf_triton/stream_door/ does the rest."""
