"""Models: a causal language model of transformers, unmodified, and its tokeniser.

    ModelConfig ─ load_model ─> LanguageModel(module, tokenizer, context) ─ save_model ─> a plain directory

The only package that imports transformers and tokenizers.
"""
