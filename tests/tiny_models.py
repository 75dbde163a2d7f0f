"""Random models of a few thousand weights, one for each kind of attention that matters here."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

import pagedkv as pk
from pagedkv_adapters.transformers import PagedCache, spec_for

VOCABULARY = 128
WINDOW = 24

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
_COMMON: dict[str, Any] = {
    "initializer_range": 0.2,  # weights so large that every token hangs on all those before it
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    return _build("LlamaForCausalLM", "LlamaConfig", {**_SIZES, **changes}, seed)


def qwen3() -> PreTrainedModel:
    return _build("Qwen3ForCausalLM", "Qwen3Config", {**_SIZES, "head_dim": 32})


def mistral() -> PreTrainedModel:
    sizes = {**_SIZES, "sliding_window": WINDOW, "head_dim": 16}
    return _build("MistralForCausalLM", "MistralConfig", sizes)


def gemma3() -> PreTrainedModel:
    """Layers with a window and layers without, by turns."""
    sizes = {
        **_SIZES,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    return _build("Gemma3ForCausalLM", "Gemma3TextConfig", sizes)


def gemma2() -> PreTrainedModel:
    """Scores are capped."""
    sizes = {
        **_SIZES,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": None,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    return _build("Gemma2ForCausalLM", "Gemma2Config", sizes)


def gpt2() -> PreTrainedModel:
    """Learnt positions, and as many KV heads as query heads."""
    sizes = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 2048}
    return _build("GPT2LMHeadModel", "GPT2Config", sizes)


def dynamic_ntk() -> PreTrainedModel:
    return llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})


def longrope() -> PreTrainedModel:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    sizes = {**_SIZES, "original_max_position_embeddings": 128, "rope_parameters": rope}
    return _build("Phi3ForCausalLM", "Phi3Config", sizes)


def t5() -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    return _build("T5ForConditionalGeneration", "T5Config", sizes)


def gemma3n() -> PreTrainedModel:
    """The last two layers use the KV of earlier ones."""
    sizes = {
        **_SIZES,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
    }
    return _build("Gemma3nForCausalLM", "Gemma3nTextConfig", sizes)


def deepseek_v3() -> PreTrainedModel:
    """Latent attention."""
    sizes = {
        **_SIZES,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
    }
    return _build("DeepseekV3ForCausalLM", "DeepseekV3Config", sizes)


def mamba() -> PreTrainedModel:
    """A recurrent state in place of KV."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2}
    return _build("MambaForCausalLM", "MambaConfig", sizes)


def gemma4() -> PreTrainedModel:
    """Heads of one size in layers with a window, and of another in those without."""
    sizes = {
        **_SIZES,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    return _build("Gemma4ForCausalLM", "Gemma4TextConfig", sizes)


def falcon(**changes: Any) -> PreTrainedModel:
    """One KV head for all query heads."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "multi_query": True,
    }
    return _build("FalconForCausalLM", "FalconConfig", {**sizes, **changes})


def gpt_oss() -> PreTrainedModel:
    """A sink beside the tokens, which torch's attention does not know."""
    sizes = {
        **_SIZES,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return _build("GptOssForCausalLM", "GptOssConfig", sizes)


def granite_swa() -> PreTrainedModel:
    """Sinks again, in another way."""
    sizes = {**_SIZES, "head_dim": 16, "sliding_window": WINDOW}
    return _build("GraniteSWAForCausalLM", "GraniteSWAConfig", sizes)


def diffllama() -> PreTrainedModel:
    """It attends twice to each layer's keys, with half of the values repeated."""
    return _build("DiffLlamaForCausalLM", "DiffLlamaConfig", _SIZES)


def jetmoe() -> PreTrainedModel:
    """It repeats the keys before it attends to them."""
    sizes = {**_SIZES, "kv_channels": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
    return _build("JetMoeForCausalLM", "JetMoeConfig", sizes)


def doge() -> PreTrainedModel:
    """Its mask hides tokens that it finds unimportant."""
    return _build("DogeForCausalLM", "DogeConfig", {**_SIZES, "keep_window_size": WINDOW})


def stablelm() -> PreTrainedModel:
    """Asks for attention by name, but does not say so."""
    return _build("StableLmForCausalLM", "StableLmConfig", _SIZES)


def bloom(**changes: Any) -> PreTrainedModel:
    """An attention of its own, with biases by distance."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 3, "n_head": 4, **changes}
    return _build("BloomForCausalLM", "BloomConfig", sizes)


def mpt(**changes: Any) -> PreTrainedModel:
    """The same, and the mask is turned into booleans."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 64, "n_layers": 3, "n_heads": 4, **changes}
    return _build("MptForCausalLM", "MptConfig", {**sizes, "max_seq_len": 2048})


def mimo_v2() -> PreTrainedModel:
    """Keys and values of different size."""
    return _build("MiMoV2FlashForCausalLM", "MiMoV2FlashConfig", {**_SIZES, "head_dim": 16})


SUPPORTED: Mapping[str, Callable[[], PreTrainedModel]] = {
    "Llama": llama,
    "Qwen3": qwen3,
    "Mistral": mistral,
    "Gemma 3": gemma3,
    "GPT-2": gpt2,
    "Falcon": falcon,
}
WINDOWED = ("Mistral", "Gemma 3")


def random_ids(num_tokens: int, seed: int) -> torch.Tensor:
    """Token ids, ``(1, token)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (1, num_tokens), generator=generator)


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: PagedCache | DynamicCache,
    **options: Any,
) -> Any:
    """Twenty tokens, greedily: ``sequences``, and ``logits`` of each step."""
    defaults = {
        "max_new_tokens": 20,
        "do_sample": False,
        "attention_mask": torch.ones_like(input_ids),
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    return model.generate(input_ids, cache=cache, **{**defaults, **options})


def usual_cache(model: PreTrainedModel) -> DynamicCache:
    """What ``generate`` takes if it is given no cache."""
    return DynamicCache(config=model.config)


def largest_difference(one: Any, other: Any) -> float:
    """Between the logits of two outputs of ``generate``, over all steps."""
    pairs = zip(one.logits, other.logits, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def open_cache(
    model: PreTrainedModel, folder: Any, num_slots: int = 4, **options: Any
) -> pk.PagedKVCache:
    """A cache over the store in ``folder``, which is made if need be."""
    spec = spec_for(model)
    store = pk.PageStore.open(folder, spec, **options)
    return pk.PagedKVCache(spec, num_slots, store)


def _build(
    model_class: str, config_class: str, sizes: Mapping[str, Any], seed: int = 0
) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**{**_COMMON, **sizes})
    model: PreTrainedModel = getattr(transformers, model_class)(config)
    return model.eval()


# -- what is refused, and what is not, for tests of the adapter's checks -------------------------


def bert(**changes: Any) -> PreTrainedModel:
    """An encoder, unless it is told to be a decoder."""
    sizes = {**_SIZES, "num_key_value_heads": None, "pad_token_id": 0, **changes}
    return _build("BertLMHeadModel", "BertConfig", sizes)


def gpt_neox() -> PreTrainedModel:
    """A decoder whose configuration says is_decoder=False all the same."""
    return _build("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_SIZES, "num_key_value_heads": None})


def bart(**changes: Any) -> PreTrainedModel:
    """The decoder of an encoder-decoder, whose configuration speaks of both."""
    sizes = {
        "vocab_size": VOCABULARY,
        "d_model": 64,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "init_std": 0.2,
        "max_position_embeddings": 2048,
    }
    return _build("BartForCausalLM", "BartConfig", {**sizes, **changes})


def whisper() -> PreTrainedModel:
    """The same, and the number of its KV heads is called that of the encoder."""
    sizes = {
        "vocab_size": VOCABULARY,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "pad_token_id": 0,
    }
    return _build("WhisperForCausalLM", "WhisperConfig", sizes)


def llama4() -> PreTrainedModel:
    """Layers that attend within chunks of the context."""
    sizes = {
        **_SIZES,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "attention_chunk_size": WINDOW,
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
    }
    return _build("Llama4ForCausalLM", "Llama4TextConfig", sizes)


def mllama() -> PreTrainedModel:
    """One layer attends to images."""
    sizes = {**_SIZES, "cross_attention_layers": [1], **_TOKENS}
    return _build("MllamaForCausalLM", "MllamaTextConfig", sizes)


def moshi() -> PreTrainedModel:
    """A window that only its cache knows."""
    sizes = {**_SIZES, "ffn_dim": 96, "sliding_window": WINDOW}
    return _build("MoshiForCausalLM", "MoshiConfig", sizes)


def openai_gpt() -> PreTrainedModel:
    """It computes everything again for each token."""
    sizes = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
    return _build("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", sizes)


def rwkv() -> PreTrainedModel:
    """A state, and no attention."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2}
    return _build("RwkvForCausalLM", "RwkvConfig", sizes)


def dory(n_recurrent_loops: int = 2) -> PreTrainedModel:
    """The layer in the middle may run several times, each with KV of its own."""
    sizes = {
        **_SIZES,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "n_recurrent_loops": n_recurrent_loops,
    }
    return _build("DoryForCausalLM", "DoryConfig", sizes)


def cpmant() -> PreTrainedModel:
    """It puts eight tokens of its own before the prompt."""
    sizes = {**_SIZES, "dim_head": 16, "dim_ff": 96, "prompt_length": 8, "prompt_types": 2}
    return _build("CpmAntForCausalLM", "CpmAntConfig", sizes)


def xlm() -> PreTrainedModel:
    """It predicts a token from a mask that stands for it."""
    sizes = {"vocab_size": VOCABULARY, "emb_dim": 64, "n_layers": 2, "n_heads": 4, "causal": True}
    return _build("XLMWithLMHeadModel", "XLMConfig", {**sizes, "pad_token_id": 2})


def idefics() -> PreTrainedModel:
    """Layers between the others attend to images."""
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision = {"embed_dim": 32, "image_size": 16, "patch_size": 8, "num_attention_heads": 2}
    sizes = {
        **_SIZES,
        **_TOKENS,
        "additional_vocab_size": 0,
        "vision_config": {**small, **vision},
        "use_resampler": False,
    }
    return _build("IdeficsForVisionText2Text", "IdeficsConfig", sizes)


def lfm2() -> PreTrainedModel:
    """A short convolution in some layers."""
    sizes = {**_SIZES, "layer_types": ["conv", "full_attention", "full_attention"]}
    return _build("Lfm2ForCausalLM", "Lfm2Config", sizes)


def falcon_h1() -> PreTrainedModel:
    """Attention and a recurrent state in the same layer."""
    sizes = {**_SIZES, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}
    return _build("FalconH1ForCausalLM", "FalconH1Config", {**sizes, "mamba_d_state": 16})


def deepseek_v32() -> PreTrainedModel:
    """An index chooses the tokens that are attended."""
    sizes = {
        **_SIZES,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
    }
    return _build("DeepseekV32ForCausalLM", "DeepseekV32Config", sizes)


def minimax(layer_type: str) -> PreTrainedModel:
    """A cache of its own, even if no layer has a recurrent state."""
    sizes = {
        **_SIZES,
        "head_dim": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": [layer_type] * 3,
    }
    return _build("MiniMaxForCausalLM", "MiniMaxConfig", sizes)


def qwen3_next() -> PreTrainedModel:
    """A class with a recurrent state, even if no layer has one here."""
    sizes = {
        **_SIZES,
        "head_dim": 16,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["full_attention"] * 3,
    }
    return _build("Qwen3NextForCausalLM", "Qwen3NextConfig", sizes)


def gemma(**changes: Any) -> PreTrainedModel:
    """A decoder, unless it is told to attend to later tokens too."""
    return _build("GemmaForCausalLM", "GemmaConfig", {**_SIZES, "head_dim": 16, **changes})


def gpt2_that_listens() -> PreTrainedModel:
    """It can attend to the output of an encoder."""
    sizes = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4}
    return _build("GPT2LMHeadModel", "GPT2Config", {**sizes, "add_cross_attention": True})


def blip2() -> PreTrainedModel:
    """Two models in one: images, and a language model that is called in turn."""
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    text = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        word_embed_proj_dim=32,
    )
    config = transformers.Blip2Config(
        vision_config={**small, "num_attention_heads": 2, "image_size": 16, "patch_size": 8},
        qformer_config={**small, "num_attention_heads": 2, "encoder_hidden_size": 32},
        text_config=text,
    )
    return transformers.Blip2ForConditionalGeneration(config).eval()


def blt() -> PreTrainedModel:
    """Four models in one, none of which is the decoder by name."""
    torch.manual_seed(0)
    part: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    part |= {"vocab_size": VOCABULARY, "num_attention_heads": 2, "num_key_value_heads": 2}
    outer = {**part, "hidden_size_global": 32, "cross_attn_k": 1}
    config = transformers.BltConfig(
        vocab_size=VOCABULARY,
        patcher_config=part,
        global_config=part,
        encoder_config=outer,
        decoder_config=outer,
        encoder_hash_byte_group_vocab=64,
        encoder_hash_byte_group_size=[2],
        cross_attn_k=1,
    )
    return transformers.BltForCausalLM(config).eval()


def rope(position: str, **form: Any) -> PreTrainedModel:
    """Rotary positions that depend on the length, in some form of configuration."""
    if position == "by layer type":
        static = {"rope_type": "default", "rope_theta": 10000.0}
        return _build(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            {
                **_SIZES,
                "head_dim": 16,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
                "rope_parameters": {"sliding_attention": static, "full_attention": form},
            },
        )
    return llama(**{position: form})


_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""For configurations that insist on numbers."""
