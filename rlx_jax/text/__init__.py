"""Text for language models: tokenizers, chat templates, and checks of prompts and token ids."""
