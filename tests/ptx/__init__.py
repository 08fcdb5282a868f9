"""An interpreter of PTX: what the compilers make of the kernels, executed on the CPU."""
