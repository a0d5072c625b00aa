"""What runs in the processes of other engines, with their interpreters: it imports nothing of nanovllm.

worker.py       the process: a job a line in, an answer a line out
serve_vllm.py serve_llama_cpp.py serve_transformers.py serve_transformers_batch.py    one engine each
to_gguf.py      writes a checkpoint as llama.cpp's file
"""
