"""``python -m cute_fp8 demo``: a real sentence encoder in FP8, judged layer by layer."""
