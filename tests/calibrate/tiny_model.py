"""A random model so small that a CPU calibrates it in seconds, texts for it, and what it makes of them."""

import json
import random
from unittest import mock

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama import modeling_llama

LAYERS, HEADS, KV_HEADS, WORDS, TEXTS, TOKENS = 3, 8, 4, 256, 8, 64


def write(folder, dtype):
    """A checkpoint with its tokenizer, folder/model, and folder/texts.jsonl: what the recipe wants."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=4 * TOKENS,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder / "model")
    draw = random.Random(5)
    texts = [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(TOKENS)) for _ in range(TEXTS)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def states(folder):
    """Q and K after RoPE, and V, without LLM Compressor: of each layer {"q": [tokens, heads, dim], ...}."""
    # Eager, and a text at a time, as LLM Compressor calibrates: another order of summing rounds to other values.
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    queries = []
    rope = modeling_llama.apply_rotary_pos_emb

    def keep_query(*args, **options):
        query, key = rope(*args, **options)
        queries.append(query)
        return query, key

    parts = []  # of each text, of each layer
    for line in (folder / "texts.jsonl").read_text().splitlines():
        queries.clear()
        tokens = tokenizer(json.loads(line)["text"], return_tensors="pt")
        with torch.no_grad(), mock.patch.object(modeling_llama, "apply_rotary_pos_emb", keep_query):
            cache = model(**tokens, use_cache=True).past_key_values
        parts.append([(query, layer.keys, layer.values) for query, layer in zip(queries, cache.layers, strict=True)])
    return [
        {side: torch.cat([x[0].transpose(0, 1) for x in texts]) for side, texts in zip("qkv", zip(*layer))}
        for layer in zip(*parts, strict=True)
    ]
