"""Published formats of quantised weights: GPTQ, AWQ, fp8, compressed-tensors, bitsandbytes and MXFP4."""
