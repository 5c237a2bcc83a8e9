"""Checkpoints: GGUF and safetensors files, their tensors, metadata, tokenizers and chat templates."""
