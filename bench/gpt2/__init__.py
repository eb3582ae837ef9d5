"""GPT-2 in fp32 on flashcli's attention: ``python -m bench.gpt2`` writes text, ``bench.gpt2.times`` measures."""
