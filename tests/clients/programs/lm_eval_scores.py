"""lm-eval's `local-completions` on the tasks of `lm_eval_tasks`: loglikelihoods and generations. Prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

URL, MODEL, TOKENIZER, TOKENIZED, BATCH, CONTEXT = sys.argv[1:]
TASKS = ["phonograph_endings", "phonograph_counting"]

found: Any = lm_eval.simple_evaluate(
    model="local-completions",
    model_args={
        "base_url": f"{URL}/v1/completions",
        "model": MODEL,
        "tokenizer": TOKENIZER,
        "tokenizer_backend": "huggingface",
        "tokenized_requests": TOKENIZED == "ids",
        "max_length": int(CONTEXT),
        "num_concurrent": 1 if int(BATCH) > 1 else 4,
        "max_retries": 1,
        "timeout": 120,
    },
    batch_size=int(BATCH),
    tasks=TASKS,
    task_manager=TaskManager(include_path=str(Path("lm_eval_tasks").resolve()), include_defaults=False),
    log_samples=True,
    bootstrap_iters=0,
    cache_requests=False,
)
results = {
    task: {name.partition(",")[0]: value for name, value in found["results"][task].items() if name.endswith(",none")}
    for task in TASKS
}
samples = {
    task: [sample["resps"] for sample in sorted(found["samples"][task], key=lambda sample: sample["doc_id"])]
    for task in TASKS
}
print()
print(json.dumps({"results": results, "samples": samples}))
