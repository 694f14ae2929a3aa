"""Measuring drafters: prompts, side-by-side benchmarks, comparison of texts."""
