"""The stages of nanovllm, and the tools that keep their chain whole."""
