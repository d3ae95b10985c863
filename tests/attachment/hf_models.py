"""Small models of Hugging Face transformers, made from configurations: nothing is downloaded."""

import torch

NAMES = ("gpt2", "llama", "mixtral", "vit", "t5")
LANGUAGE = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
IDS = torch.arange(4 * 9).view(4, 9) * 11 % 61


def build(name, **changes):
    """A model in training mode, and what it is called with."""
    import transformers as hf

    llama = {**LANGUAGE, "intermediate_size": 40, "num_key_value_heads": 1, "attention_dropout": 0.1}
    makes = {
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=3, n_head=2)
        ),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**llama, tie_word_embeddings=True)),
        "mixtral": lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**llama, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
        ),
        "vit": lambda: hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=16,
                num_hidden_layers=3,
                num_attention_heads=2,
                intermediate_size=32,
                image_size=8,
                patch_size=4,
                hidden_dropout_prob=0.1,
            )
        ),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
        ),
    }
    torch.manual_seed(0)
    model = makes[name]().train()
    if name == "vit":
        given = {
            "pixel_values": torch.linspace(-1, 1, 4 * 3 * 64).view(4, 3, 8, 8),
            "labels": torch.tensor([0, 1, 1, 0]),
        }
    else:
        given = {"input_ids": IDS, "labels": IDS}
        if name != "t5":
            given["use_cache"] = False
    return model, given


def accumulated(given):
    """Two micro-batches."""

    def step(model):
        losses = []
        for half in (slice(0, 2), slice(2, 4)):
            part = {key: value[half] if isinstance(value, torch.Tensor) else value for key, value in given.items()}
            loss = model(**part).loss
            loss.backward()
            losses.append(loss)
        return losses

    return step
