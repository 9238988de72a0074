"""The decoder block: a layer of Llama or Qwen as GEMMs and the kernels between them.

Importing it registers its ``torch.library`` ops.
"""

from cute_fp8.decoder.block import decoder_block, decoder_mlp

__all__ = ["decoder_block", "decoder_mlp"]
