"""Answer a conversation, then several in one batch, with a chat template from the script."""

from vllm import LLM

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def print_outputs(outputs):
    print("\nGenerated Outputs:\n" + "-" * 80)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}\n")
        print(f"Generated text: {output.outputs[0].text!r}")
        print("-" * 80)


llm = LLM(model="meta-llama/Llama-3.2-1B-Instruct", max_model_len=512)
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 12

conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about the importance of higher education."},
]
outputs = llm.chat(conversation, sampling_params, use_tqdm=False, chat_template=TEMPLATE)
print_outputs(outputs)

conversations = [conversation for _ in range(3)]
batch = llm.chat(conversations, sampling_params, use_tqdm=True, chat_template=TEMPLATE)
print_outputs(batch)
