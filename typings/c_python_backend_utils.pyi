"""What hf_triton uses of the module that the stub of Triton's Python backend is."""

class SharedMemory:
    def free_memory(self) -> int: ...

shared_memory: SharedMemory
