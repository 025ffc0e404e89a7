"""One attention entry point, its kernels, and ragged or padded streams."""
