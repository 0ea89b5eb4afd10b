"""Checkpoints: open weights of any format (`source.open_weights`), list their tensors, read all or parts of them."""
