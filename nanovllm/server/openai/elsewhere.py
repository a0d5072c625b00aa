"""Fields of OpenAI's and vLLM's bodies that are not served here, each with the values that ask for nothing."""

from typing import Any

Only = dict[str, tuple[Any, ...]]

ELSEWHERE: Only = {
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "priority": (0,),
    "cache_salt": (),
    "request_id": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "stream_interval": (1,),
    "vllm_xargs": ({},),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "mm_payload": ("tensors", "none"),
    "return_mm_kwargs": (True, False),
}
OF_COMPLETIONS_ELSEWHERE: Only = {
    "suffix": ("",),
    "prompt_embeds": ([],),
}
OF_CHAT_ELSEWHERE: Only = {
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "verbosity": ("medium",),
    "echo": (False,),
    "chat_template": (),
    "include_reasoning": (True,),
    "return_prompt_text": (False,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}
OF_RESPONSES_ELSEWHERE: Only = {
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "background": (False,),
    "background_options": (),
    "truncation": ("disabled",),
    "stream_options": ({}, {"include_obfuscation": False}),
    "max_tool_calls": (),
    "context_management": ([],),
    "moderation": (),
    "image": (),
    "access_programs": (),
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "enable_response_messages": (False,),
    "previous_input_messages": ([],),
}
