"""Paged decode in .safetensors files: what is asked, answers, cases, comparisons."""
