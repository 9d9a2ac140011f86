"""Which bucket shapes to capture as CUDA graphs, and the speed-up to expect."""
