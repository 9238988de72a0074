"""The decoder block: a layer of Llama or Qwen as GEMMs and the kernels between them."""
