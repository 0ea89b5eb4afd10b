"""Independent answers to compare the library with.

- `numpy_reference`: Llama, BERT and sentence pooling in plain NumPy float64, read from a checkpoint directory.
- `op_formulas`: every tensor op in NumPy float64.
- `hugging_face`: tiny random checkpoints made by `transformers`, and what it computes from them (needs torch).
- `checkpoints`: copies of a checkpoint directory with something changed.
- `make_fixtures`: records `tests/fixtures` (run by hand).

Nothing in here imports the library under test.
"""
