"""EleutherAI's evaluation harness: scores of this server equal those of its own backend, transformers."""

import json
import os
import tempfile
from pathlib import Path

import lm_eval

CHECKPOINT = "models/storyteller"
STORIES = [
    {"text": "Once upon a time there was a little fox. The fox lived in the wood with her mother.", "good": 0},
    {"text": "The old bear had a red boat. One day he took it to the river and rowed far away.", "good": 0},
]
ANIMALS = [
    {"text": "Once upon a time there was a little", "choices": ["fox who lived in the wood.", "of and the to."]},
    {"text": "The king had three", "choices": ["upon away him.", "sons, and the youngest was kind."]},
]
server = {
    "model": "storyteller",
    "base_url": f"{os.environ['OPENAI_BASE_URL']}/completions",
    "tokenizer": CHECKPOINT,
    "tokenizer_backend": "huggingface",
    "max_length": 1024,
}


transformers = {"pretrained": CHECKPOINT, "dtype": "float32", "add_bos_token": False}  # as for a server


def evaluate(name, documents, **task):
    """Return the metrics and the samples of a task, from the server and from transformers."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "documents.jsonl")
        file.write_text("".join(json.dumps(document) + "\n" for document in documents))
        files = {"data_files": {"test": str(file)}, "cache_dir": folder}
        task |= {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        models = [("local-completions", server), ("hf", transformers)]
        runs = [
            lm_eval.simple_evaluate(model, model_args=arguments, tasks=[{**task}], device="cpu", bootstrap_iters=0)
            for model, arguments in models
        ]
    return [(run["results"][name], run["samples"][name]) for run in runs]


def try_perplexity():
    task = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    metrics = [{"metric": metric} for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte")]
    (ours, _), (theirs, _) = evaluate("stories", STORIES, metric_list=metrics, **task)
    for metric in ("word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none"):
        assert ours[metric] > 0 and abs(ours[metric] / theirs[metric] - 1) < 1e-4, (metric, ours, theirs)


def try_multiple_choice():
    task = {"output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}"}
    documents = [{**animal, "good": good} for animal, good in zip(ANIMALS, (0, 1), strict=True)]
    metrics = [{"metric": "acc"}, {"metric": "acc_norm"}]
    (ours, _), (theirs, _) = evaluate("animals", documents, doc_to_target="{{good}}", metric_list=metrics, **task)
    assert ours["acc,none"] == theirs["acc,none"] and ours["acc_norm,none"] == theirs["acc_norm,none"]


def try_generation():
    task = {"output_type": "generate_until", "doc_to_text": "{{text}}", "generation_kwargs": {"until": ["."]}}
    task["generation_kwargs"] |= {"max_gen_toks": 24, "temperature": 0.0, "do_sample": False}
    documents = [{"text": story["text"][:40], "target": "The"} for story in STORIES]
    metrics = [{"metric": "exact_match"}]
    runs = evaluate("endings", documents, doc_to_target="{{target}}", metric_list=metrics, **task)
    # transformers decodes the new tokens without the prompt, and loses a space at their beginning
    ours, theirs = ([sample["resps"][0][0].lstrip() for sample in samples] for _, samples in runs)
    assert ours == theirs and all(ours), (ours, theirs)
