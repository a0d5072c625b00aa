"""Stream the text of several prompts in an event loop."""

import asyncio

from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    sampling_params = SamplingParams(
        max_tokens=20,
        temperature=0.8,
        top_p=0.95,
        seed=42,
        output_kind=RequestOutputKind.DELTA,
    )
    pieces = []
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
        for completion in output.outputs:
            if completion.text:
                pieces.append(completion.text)
        if output.finished:
            print(f"{prompt} ->{''.join(pieces)!r} in {len(pieces)} pieces")
            break


async def main():
    engine_args = AsyncEngineArgs(model="meta-llama/Llama-3.2-1B-Instruct", enforce_eager=True, max_model_len=512)
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        prompts = ["The future of artificial intelligence is", "In a galaxy far, far away", "The key to happiness is"]
        await asyncio.gather(*(stream_response(engine, prompt, f"stream-{i}") for i, prompt in enumerate(prompts)))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
