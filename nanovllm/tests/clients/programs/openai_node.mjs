// OpenAI's client for Node.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI();
const model = "assistant";
const user = (content) => [{ role: "user", content }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const getWeather = { name: "get_weather", parameters };
const tools = [{ type: "function", function: getWeather }];

export async function chat() {
  const answer = await client.chat.completions.create({ model, messages: user("Tell me about a fox.") });
  assert.equal(answer.choices[0].message.content, "A fox lives in the wood.");
}

export async function streamedChat() {
  const stream = await client.chat.completions.create({ model, messages: user("Tell me about a fox."), stream: true });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  assert.equal(text, "A fox lives in the wood.");
}

export async function toolCalls() {
  const messages = user("What is the weather in Paris?");
  const { message, finish_reason } = (await client.chat.completions.create({ model, messages, tools })).choices[0];
  const [call] = message.tool_calls;
  assert.equal(finish_reason, "tool_calls");
  assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
  messages.push(message, { role: "tool", tool_call_id: call.id, content: "18 degrees" });
  const answer = await client.chat.completions.create({ model, messages, tools });
  assert.equal(answer.choices[0].message.content, "It is 18 degrees in Paris.");
}

export async function toolRunner() {
  const run = ({ city }) => ({ Oslo: "5 degrees", Rome: "24 degrees" })[city];
  const runnable = [{ type: "function", function: { ...getWeather, function: run, parse: JSON.parse } }];
  const messages = user("Which is warmer, Oslo or Rome?");
  const runner = client.chat.completions.runTools({ model, messages, tools: runnable, stream: true });
  assert.equal(await runner.finalContent(), "Rome is warmer.");
}

export async function structuredOutput() {
  const Person = z.object({ name: z.string(), age: z.number() });
  const response_format = zodResponseFormat(Person, "person");
  const messages = user("Jason is 25 years old.");
  const answer = await client.chat.completions.parse({ model, messages, response_format });
  assert.deepEqual(answer.choices[0].message.parsed, { name: "Jason", age: 25 });
}

export async function responses() {
  const tools = [{ type: "function", strict: false, ...getWeather }];
  const response = await client.responses.create({ model, input: "What is the weather in Paris?", tools });
  const [call] = response.output.filter((item) => item.type === "function_call");
  assert.deepEqual(JSON.parse(call.arguments), { city: "Paris" });
  const text = (await client.responses.create({ model, input: "Tell me about a fox." })).output_text;
  assert.equal(text, "A fox lives in the wood.");
}

export async function embeddings() {
  const { data } = await client.embeddings.create({ model, input: ["A fox lives in the wood."] });
  const norm = data[0].embedding.reduce((sum, x) => sum + x * x, 0);
  assert.ok(Math.abs(norm - 1) < 1e-3);
}
