// Vercel's AI SDK, with its provider for OpenAI-compatible servers.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "nanovllm",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
  supportsStructuredOutputs: true,
});
const model = provider("assistant");
const weather = { Paris: "18 degrees", Oslo: "5 degrees", Rome: "24 degrees" };
const tools = {
  get_weather: tool({
    description: "Return the weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => weather[city],
  }),
};

export async function text() {
  assert.equal((await generateText({ model, prompt: "Tell me about a fox." })).text, "A fox lives in the wood.");
}

export async function streamedText() {
  const { textStream } = streamText({ model, prompt: "Tell me about a fox." });
  assert.equal((await Array.fromAsync(textStream)).join(""), "A fox lives in the wood.");
}

export async function toolCalls() {
  const { text } = await generateText({ model, tools, stopWhen: isStepCount(3), prompt: "What is the weather in Paris?" });
  assert.equal(text, "It is 18 degrees in Paris.");
}

export async function streamedToolCalls() {
  const result = streamText({ model, tools, stopWhen: isStepCount(3), prompt: "Which is warmer, Oslo or Rome?" });
  assert.equal(await result.text, "Rome is warmer.");
  const inputs = (await result.steps)[0].toolCalls.map((call) => call.input);
  assert.deepEqual(inputs, [{ city: "Oslo" }, { city: "Rome" }]);
}

export async function requiredTool() {
  const { toolCalls } = await generateText({ model, tools, toolChoice: "required", prompt: "Call it for Lima." });
  assert.deepEqual(toolCalls.map((call) => call.input), [{ city: "Lima" }]);
}

export async function structuredOutput() {
  const schema = z.object({ name: z.string(), age: z.number() });
  const { output } = await generateText({ model, output: Output.object({ schema }), prompt: "Jason is 25 years old." });
  assert.deepEqual(output, { name: "Jason", age: 25 });
}

export async function reasoning() {
  const { text, reasoningText } = await generateText({ model, prompt: "How many legs has a fox?" });
  assert.equal(text, "Four.");
  assert.equal(reasoningText, "A fox is an animal with four legs.");
}

export async function embeddings() {
  const values = ["A fox lives in the wood.", "Once upon a time"];
  const { embeddings } = await embedMany({ model: provider.embeddingModel("assistant"), values });
  assert.notDeepEqual(embeddings[0], embeddings[1]);
}
