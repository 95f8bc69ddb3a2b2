// Vercel's AI SDK with its provider for OpenAI-compatible servers.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const asked = JSON.parse(process.argv[2]);
const provider = createOpenAICompatible({ name: "moonshard", baseURL: asked.base_url, includeUsage: true });
const model = provider(asked.model);
const counted = (usage) => [usage.inputTokens, usage.outputTokens];

async function whole() {
  const { text, usage } = await generateText({ model, prompt: asked.question, maxRetries: 0 });
  return { chat: text, usage: counted(usage) };
}

async function streamed() {
  const pieces = [];
  const run = streamText({ model, prompt: asked.question, maxRetries: 0 });
  for await (const piece of run.textStream) pieces.push(piece);
  return { pieces, stream_usage: counted(await run.usage) };
}

async function withTool() {
  const calls = [];
  const get_weather = tool({
    description: "Weather in a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async (call) => {
      calls.push(call);
      return asked.weather;
    },
  });
  const options = { model, prompt: asked.tool_question, tools: { get_weather }, stopWhen: stepCountIs(3) };
  const answer = await streamText({ ...options, maxRetries: 0 }).text;
  return { answer, calls };
}

async function overflow() {
  try {
    await generateText({ model, prompt: asked.too_long, maxRetries: 0 });
  } catch (error) {
    return { overflow: APICallError.isInstance(error) ? error.data.error.code : String(error) };
  }
}

const parts = [await whole(), await streamed(), await withTool(), await overflow()];
console.log(JSON.stringify(Object.assign({}, ...parts)));
