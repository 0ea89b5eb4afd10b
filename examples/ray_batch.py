"""A file of prompts on several machines or GPUs: Ray Data reads and divides it, and each worker holds the model.

    pip install "ray[data]"
    python examples/ray_batch.py path/to/llama prompts.jsonl answers --workers 2 --gpus 1

`prompts.jsonl` has a `{"prompt": "..."}` on each line; other fields are kept. The directory `answers` gets JSON Lines,
a file for each block. On a cluster, run it on the head node, with paths that all nodes can read.
"""

import argparse

import rlx_jax as rlx


class Generator:
    """A worker of Ray: it loads the model once, and answers batches of prompts by continuous batching."""

    def __init__(self, directory, max_new_tokens):
        self.lm, self.max_new_tokens = rlx.load(directory), max_new_tokens

    def __call__(self, batch):
        answers = self.lm.generate([str(prompt) for prompt in batch["prompt"]], self.max_new_tokens)
        return {**batch, "answer": answers}


def answer_file(directory, source, target, max_new_tokens=64, workers=1, gpus=0, batch_size=1024):
    """Write the answers to the prompts of a file.

    An answer does not depend on its batch, so the number of workers changes the time alone. For random answers add a
    column of seeds, and pass `seed=[int(seed) for seed in batch["seed"]]` to `generate`.
    """
    import ray  # not a dependency of rlx_jax

    # Workers count no CPUs, so that some remain for reading the file.
    answers = ray.data.read_json(source).map_batches(
        Generator, fn_constructor_args=(directory, max_new_tokens), batch_size=batch_size,
        num_cpus=0, num_gpus=gpus, compute=ray.data.ActorPoolStrategy(size=workers),
    )  # fmt: skip
    answers.write_json(target)


def main():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", help="a checkpoint that every worker can read")
    parser.add_argument("input", help="prompts.jsonl")
    parser.add_argument("output", help="a directory for the answers")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1, help="processes, each with a model")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each worker")
    parser.add_argument("--batch-size", type=int, default=1024, help="prompts that a worker gets at once")
    args = parser.parse_args()
    sizes = args.max_new_tokens, args.workers, args.gpus, args.batch_size
    answer_file(args.directory, args.input, args.output, *sizes)


if __name__ == "__main__":
    main()
