// OpenAI's own package for Node.

import OpenAI from "openai";

const asked = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: asked.base_url, apiKey: "none", maxRetries: 0 });
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Weather in a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

const user = (content) => ({ model: asked.model, messages: [{ role: "user", content }] });
const counted = (usage) => [usage.prompt_tokens, usage.completion_tokens];

async function whole() {
  const answer = await client.chat.completions.create(user(asked.question));
  return { chat: answer.choices[0].message.content, usage: counted(answer.usage) };
}

async function streamed() {
  const pieces = [];
  const stream = client.chat.completions.stream({ ...user(asked.question), stream_options: { include_usage: true } });
  stream.on("content", (piece) => pieces.push(piece));
  return { pieces, stream_usage: counted(await stream.totalUsage()) };
}

async function withTool() {
  const calls = [];
  const get_weather = ({ city }) => {
    calls.push({ city });
    return asked.weather;
  };
  const [tool] = tools;
  const runner = client.chat.completions.runTools({
    ...user(asked.tool_question),
    tools: [{ ...tool, function: { ...tool.function, function: get_weather, parse: JSON.parse } }],
  });
  return { answer: await runner.finalContent(), calls };
}

async function overflow() {
  try {
    await client.chat.completions.create(user(asked.too_long));
  } catch (error) {
    return { overflow: error instanceof OpenAI.BadRequestError ? error.code : String(error) };
  }
}

const parts = [await whole(), await streamed(), await withTool(), await overflow()];
console.log(JSON.stringify(Object.assign({}, ...parts)));
