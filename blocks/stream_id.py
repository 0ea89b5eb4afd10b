"""Conventional names of streams: the main value, image tokens, text tokens. Any other string is a name too."""

MAIN = "main"
IMG = "img"
TXT = "txt"
