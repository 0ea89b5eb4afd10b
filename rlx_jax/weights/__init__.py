"""Checkpoints: open weights of any format (`source.open_weights`), list their tensors, and read all or parts of them."""
