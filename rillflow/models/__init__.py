"""Models: a decoder of transformers, unmodified, and its tokeniser.

    ModelConfig ─┬─ load_model ────────> LanguageModel ─┬─ save_model ─> a plain directory
                 └─ load_scalar_model ─> ScalarModel ───┘

Both hold module, tokenizer and context.

The only package that imports transformers and tokenizers.
"""
