"""Files and the Hugging Face Hub: safe paths, strict JSON, limits, atomic writes, a cache and downloads."""
