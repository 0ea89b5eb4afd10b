"""Conventional names of streams: the main value, image tokens and text tokens. Any other string is also valid."""

MAIN = "main"
IMG = "img"
TXT = "txt"
