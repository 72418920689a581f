"""A tiny language model in a folder, as transformers saves it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def save_model(folder: Path, *, answer: str = "", room: int = 4096, chat: bool = False) -> Path:
    """A Llama of one small layer over bytes: with random weights, or with such that it writes `answer` and nothing
    else, over and over."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    if answer:
        fast.add_tokens([AddedToken(answer, normalized=False)])
    if chat:
        fast.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=room,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    if answer:
        with torch.no_grad():
            # The same state at every place, which points at the answer's token.
            model.model.embed_tokens.weight.fill_(1)
            model.model.layers[0].self_attn.o_proj.weight.zero_()
            model.model.layers[0].mlp.down_proj.weight.zero_()
            model.lm_head.weight.zero_()
            model.lm_head.weight[-1] = 1
    model.save_pretrained(folder)
    return folder
