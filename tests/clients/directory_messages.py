"""Messages of a push of each directory of trained_directories.py: `DIR` is the directory."""

from __future__ import annotations

# Directories that are served without a word are not here.
SAYS = {
    "added token, trained": "the tokenizer of its requests also has the added tokens '[call]'",
    "added tokens, own embeddings": "the tokenizer of its requests also has the added tokens '[a]', '[b]'",
    "an end token of its own": "its answers also end with 14",
    "TRL": "chat_template.jinja was taken: chats with the adapter use its template",
    "a template of transformers before 4.56": (
        "tokenizer_config.json was taken: chats with the adapter use its template"
    ),
    "torch.compile": "names of tensors were read without '_orig_mod.'",
    "DDP": "names of tensors were read without 'module.'",
    "FSDP": "names of tensors were read without '_fsdp_wrapped_module.'",
    "a module's own state": "names of tensors were read without 'default.'",
    "names of the model alone": "names of tensors were read with 'base_model.model.' in front",
    "MLX": "chat_template.jinja was taken: chats with the adapter use its template",
    "MLX, DoRA": "chat_template.jinja was taken: chats with the adapter use its template",
    "saved before training": (
        "every lora_B is zero: its LoRA layers change nothing; was it saved before it was trained?"
    ),
    "alpha 0": "lora_alpha is 0: its LoRA layers change nothing",
}
ERRORS = {
    "resized embeddings": (
        "adapter_model.safetensors: was trained with 22 tokens, the base has 20; train new tokens in rows "
        "that no token of the base has (trainable_token_indices, modules_to_save), or merge the adapter into "
        "its model (merge_and_unload) and register that with `loraplex models push`"
    ),
    "LoRA of resized embeddings": (
        "adapter_model.safetensors: was trained with 22 tokens, the base has 20; train new tokens in rows "
        "that no token of the base has (trainable_token_indices, modules_to_save), or merge the adapter into "
        "its model (merge_and_unload) and register that with `loraplex models push`"
    ),
    "own resized embeddings": (
        "adapter_model.safetensors: was trained with 22 tokens, the base has 20; train new tokens in rows "
        "that no token of the base has (trainable_token_indices, modules_to_save), or merge the adapter into "
        "its model (merge_and_unload) and register that with `loraplex models push`"
    ),
    "cut embeddings": (
        "adapter_model.safetensors: was trained with 18 tokens, the base has 20; leave out "
        "resize_token_embeddings, which cut rows that no token has"
    ),
    "added token without a row": (
        "tokenizer.json: has the added token '[c]' as number 20, and the base has embeddings for 20 tokens; "
        "merge the adapter into its model (merge_and_unload) and register that with `loraplex models push`, "
        "or remove the file beside the adapter if nothing was trained with the token"
    ),
    "another tokenizer": (
        "tokenizer.json: has the added token '[a]' as number 19, which is 18 beside the base's: the adapter "
        "was trained with another tokenizer than the base's"
    ),
    "checkpoints": (
        "DIR is not an adapter, but the parent of checkpoints: give one of the 2 below it, such as DIR/checkpoint-10"
    ),
    "adapters below": (
        "DIR is not an adapter, but the parent of adapters: give one of the 1 below it, such as DIR/formal"
    ),
    "a hub's cache": (
        "DIR is not an adapter, but the root of a hub's cache: give one of the 1 below it, such as DIR/snapshots/0a1b"
    ),
    "pickle": (
        "DIR has its weights in adapter_model.bin, a pickle, which may run code when it is read; save them "
        "as adapter_model.safetensors: model.save_pretrained(DIR), or "
        "safetensors.torch.save_file(torch.load('adapter_model.bin', weights_only=True), "
        "'adapter_model.safetensors')"
    ),
    "shards": (
        "DIR has its weights in 2 files; join them as adapter_model.safetensors: load each with "
        "safetensors.torch.load_file, and save all tensors with save_file"
    ),
    "git without git-lfs": (
        "DIR has a pointer of git-lfs as adapter_model.safetensors, and not the file: run `git lfs pull` there"
    ),
    "FSDP's shards": (
        "DIR has no adapter_model.safetensors, but pytorch_model_fsdp_0, FSDP's shards: train with "
        "fsdp_state_dict_type FULL_STATE_DICT, or load them, and save the adapter with "
        "model.save_pretrained(DIR)"
    ),
    "DeepSpeed's shards": (
        "DIR has no adapter_model.safetensors, but global_step5, DeepSpeed's shards: save the adapter with "
        "accelerator.unwrap_model(model).save_pretrained(DIR, state_dict=accelerator.get_state_dict(model))"
    ),
    "DeepSpeed ZeRO-3, not gathered": (
        "adapter_model.safetensors: tensor base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight "
        "has the shape [0]; two sizes are needed; DeepSpeed ZeRO-3 has not gathered it: save by "
        "accelerator.get_state_dict(model)"
    ),
    "the whole model's state": (
        "adapter_model.safetensors: has base_model.model.model.layers.0.self_attn.k_proj.base_layer.weight, "
        "a weight of the base: it is the whole model's state; save the adapter alone, by "
        "model.save_pretrained(DIR) or get_peft_model_state_dict(model)"
    ),
    "two adapters in a file": (
        "adapter_model.safetensors: has base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight of "
        "brief and of formal; save one adapter: model.save_pretrained(DIR, selected_adapters=[NAME])"
    ),
    "full fine-tune": "DIR is not an adapter, but a whole model: `loraplex models push` registers one",
    "MLX, full": "DIR: fine_tune_type: is 'full': only lora and dora are adapters",
    "prompt tuning": "peft_type: 'PROMPT_TUNING' is not served, only 'LORA'; train plain LoRA",
    "IA3": "peft_type: 'IA3' is not served, only 'LORA'; train plain LoRA",
    "LoHa": (
        "peft_type: 'LOHA' is not served, only 'LORA'; peft's save_as_lora(DIR, model, rank=64) makes a LoRA "
        "that is close to it"
    ),
    "VeRA": (
        "peft_type: 'VERA' is not served, only 'LORA'; peft's save_as_lora(DIR, model, rank=64) makes a LoRA "
        "that is close to it"
    ),
    "PiSSA": (
        "init_lora_weights: 'pissa' changed the base model's weights; convert it to plain LoRA with peft's "
        "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
    ),
    "OLoRA": (
        "init_lora_weights: 'olora' changed the base model's weights; convert it to plain LoRA with peft's "
        "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
    ),
    "biases": "lora_bias: biases of LoRA layers are not served; train with lora_bias=False",
    "a norm trained in full": (
        "modules_to_save: a fully trained norm is not supported, only embeddings, lm_head, and "
        "classification heads (classifier, score, pooler, head)"
    ),
    "an invocation in words": (
        "alora_invocation_string: was replaced in peft: put its token ids, of the base's tokenizer, into "
        "alora_invocation_tokens"
    ),
    "another model": (
        "adapter_model.safetensors: model.layers.0.self_attn.k_proj is for 128 inputs and 32 outputs; the "
        "base has 64 and 32"
    ),
}
